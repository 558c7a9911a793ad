"""Plug-ins that keep the contract, and those that break it in one way each: the function's name says which."""

import copy
import random

import numpy as np

from vime.hooks import DynamicFilterOutput
from vime.rollout.generate import generate as turn
from vime.sample import Sample
from vime.slime import GenerateState, get_model_url, post


async def good_generate(args, sample, sampling_params):
    sample = await turn(args, sample, sampling_params | {"stop": ["?"]})
    sample.append_tokens([9], trainable=False)
    return await turn(args, sample, sampling_params)


async def good_as_in_slime(args, sample: Sample, sampling_params, evaluation=False):
    """SGLang's body and answer, two segments made by hand."""
    state, out = GenerateState(args), []
    text = sample.prompt
    for _ in range(2):
        answer = await post(get_model_url(args, "actor"), {"text": text, "sampling_params": sampling_params, "return_logprob": True})
        rows = answer["meta_info"]["output_token_logprobs"]
        ids = state.tokenizer(text, add_special_tokens=False)["input_ids"]
        s = Sample(tokens=ids, prompt=text, label=sample.label)
        s.append_response_tokens(
            args, tokens=[r[1] for r in rows], log_probs=[r[0] for r in rows], meta_info=answer["meta_info"], text=answer["text"]
        )
        text += answer["text"] + "? "
        out.append(s)
    assert evaluation in (True, False)
    return out


async def tokenizes_anew(args, sample, sampling_params):
    sample = await turn(args, sample, sampling_params)
    again = GenerateState(args).tokenizer(sample.response + "?", add_special_tokens=False)["input_ids"]
    sample.tokens = sample.tokens[: sample.prompt_length] + again
    sample.rollout_log_probs, sample.loss_mask = [-1.0] * len(again), [1] * len(again)
    sample.token_versions, sample.response_length = [0] * len(again), len(again)
    return sample


async def forgets_a_logprob(args, sample, sampling_params):
    sample = await turn(args, sample, sampling_params)
    sample.rollout_log_probs.pop()
    return sample


async def stays_pending(args, sample, sampling_params):
    sample = await turn(args, sample, sampling_params)
    sample.status = Sample.Status.PENDING
    return sample


SHARED: list[int] = []


async def shares_a_list(args, sample, sampling_params):
    sample = await turn(args, sample, sampling_params)
    SHARED[:] = sample.loss_mask
    sample.loss_mask = SHARED
    n = sample.response_length
    SHARED[:] = [1] * n
    return sample


async def keeps_a_set(args, sample, sampling_params):
    sample.metadata["seen"] = {1, 2}
    return await turn(args, sample, sampling_params)


async def good_numpy(args, sample, sampling_params):
    sample = await turn(args, sample, sampling_params)
    sample.metadata["scores"], sample.status = np.array([1.5, 2.5]), str(sample.status)
    sample.loss_mask, sample.tokens = np.array(sample.loss_mask), tuple(sample.tokens)
    return sample


def reward_of_bytes(args, sample):
    return {"acc": 1.0, "why": b"x"}


async def gives_nothing(args, sample, sampling_params):
    return None


def is_not_async(args, sample, sampling_params):
    return sample


def good_reward(args, sample, **kwargs):
    return float(sample.response == sample.label)


async def nan_reward(args, sample):
    return float("nan")


def clips_the_response(args, sample):
    sample.response = sample.response[:0]
    return 0.0


async def group_of_dicts(args, samples):
    return [{"acc": float(s.response == s.label)} for s in samples]


def one_for_all(args, samples):
    return [1.0]


def good_filter(args, samples, **kwargs):
    flat = len({s.get_reward_value(args) for s in samples}) == 1
    return DynamicFilterOutput(keep=not flat, reason="flat" if flat else None)


def silent_filter(args, samples):
    len({s.reward for s in samples})


def filter_that_edits(args, samples):
    samples[0].reward = 5.0
    return True


def good_buffer(args, rollout_id, buffer, num_samples):
    got = buffer[:num_samples]
    del buffer[:num_samples]
    return got


def keeps_in_buffer(args, rollout_id, buffer, num_samples):
    return buffer[:num_samples]


def good_sample_filter(args, groups):
    for g in groups:
        g[0].remove_sample = True


def sample_filter_that_scores(args, groups):
    groups[0][0].reward = 0.25


def good_hook(args, sample, rollout_id):
    sample = copy.deepcopy(sample)
    sample.metadata["step"] = rollout_id
    return sample


def hook_of_text(args, sample):
    return sample.response


def good_post(args, samples):
    raw = [s.get_reward_value(args) for s in samples]
    return raw, [r - sum(raw) / len(raw) for r in raw]


def post_of_groups(args, samples):
    return [0.0], [0.0]


def good_log(rollout_id, args, samples, extra_metrics, rollout_time):
    extra_metrics["rollout/words"] = len(samples)


def log_of_text(rollout_id, args, samples, extra_metrics, rollout_time):
    return "logged"


class GoodSource:
    def __init__(self, args):
        self.n, self.given, self.saved = args.n_samples_per_prompt, 0, 0
        self.back: list[list[Sample]] = []

    def get_samples(self, num_samples):
        at = range(self.given, self.given + num_samples)
        self.given += num_samples
        return [[Sample(prompt=f"{i} + 1", index=i * self.n + k) for k in range(self.n)] for i in at]

    def add_samples(self, samples):
        self.back += samples

    def save(self, rollout_id):
        self.saved = self.given

    def load(self, rollout_id=None):
        self.given = self.saved

    def __len__(self):
        return 100


class ForgetfulSource(GoodSource):
    def get_samples(self, num_samples):
        return [[Sample(prompt=str(random.random())) for _ in range(self.n)] for _ in range(num_samples)]
