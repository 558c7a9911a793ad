from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vime import config
from vime.errors import VimeError

BASE: dict[str, Any] = {"model": "m", "data": {"prompts": "p.jsonl"}}
EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*/run.toml"))


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text('model = "m"\n' + text + '\n[data]\nprompts = "p.jsonl"\n')
    return path


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.parent.name)
def test_the_examples_are_valid_and_survive_a_round_trip(path: Path, tmp_path: Path) -> None:
    cfg = config.load(path)
    (tmp_path / "again.toml").write_text(config.dump(cfg))
    assert config.load(tmp_path / "again.toml") == cfg


def test_there_are_examples() -> None:
    assert {p.parent.name for p in EXAMPLES} >= {"reverse", "arithmetic"}


def test_every_fault_is_reported_at_once_with_the_nearest_name(tmp_path: Path) -> None:
    path = write(tmp_path, "sed = 3\n[train]\nstpes = 3\nlr = 'fast'\n[rewrd]\n[rollout]\nbatch_size = 0")
    with pytest.raises(VimeError) as e:
        config.load(path)
    text = str(e.value)
    assert "5 faults" in text
    assert "sed: unknown key; did you mean 'seed'?" in text
    assert "train.stpes: unknown key; did you mean 'steps'?" in text
    assert "rewrd: unknown key; did you mean 'reward'?" in text
    assert "train.lr" in text and "got 'fast'" in text
    assert "rollout.batch_size" in text and "got 0" in text


def test_missing_keys(tmp_path: Path) -> None:
    with pytest.raises(VimeError, match=r"model: missing(.|\n)*data: missing"):
        config.validate({}, "x.toml")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["data_plane.backend=moncake"], "data_plane.backend: Input should be .*; did you mean 'mooncake'"),
        (["data_plane.mooncake.replicas=2"], "data_plane.mooncake. has no meaning with data_plane.backend = 'shm'"),
        (["data_plane.backend=mooncake", "data_plane.mooncake.replicas=2"], "2 copies need as many segments, and 'own' storage has 1"),
        (["data_plane.backend=mooncake", "data_plane.mooncake.device=mlx5_0"], "device 'mlx5_0' is of protocol = \"rdma\""),
        (["train.global_batch_size=7"], "does not divide rollout.batch_size x n_samples_per_prompt = 64"),
        (["parallel.fsdp=3"], "parallel.fsdp 3 does not divide"),
        (["rollout.n_samples_per_prompt=1"], "grpo needs"),
        (["rollout.max_response_len=9", "rollout.max_context_len=9"], "leaves no room for a prompt"),
        (["train.max_staleness=1"], 'max_staleness 1 trains on samples of older weights: set algo.correction = "tis"'),
        (["algo.correction=tis", "algo.custom_tis=m:f"], "custom_tis takes the place of correction = 'tis'"),
        (["algo.correction=icepop", "algo.tis_clip=0.4"], "tis_clip_low 0.5 is above tis_clip 0.4"),
        (["algo.use_opsm=true", "loss.custom=m:f"], "loss.custom takes the place of the policy loss"),
        (["algo.policy_loss=gspo", "loss.custom=m:f"], "loss.custom takes the place of the policy loss"),
        (["algo.kl_coef=0.1", "algo.kl_loss_coef=0.1"], "would charge the KL twice"),
        (["algo.gamma=0.9"], "gamma 0.9 discounts along the tokens, where grpo compares whole responses"),
        (["algo.advantage_estimator=opo", "rollout.n_samples_per_prompt=1"], "opo needs rollout.n_samples_per_prompt >= 2"),
        (["algo.policy_loss=gpg", "algo.correction=rollout_logprobs"], "nothing corrects for"),
        (["algo.custom_advantage=m:f", "algo.kl_coef=0.1"], "custom_advantage sets every token's advantage"),
        (["algo.rejection=seq_mean_k3"], "needs rejection_high"),
        (["weights.transport=nccl", "weights.delta=true"], 'weights.transport = "nccl" does not go with weights.delta'),
        (["weights.transport=nccl", 'vllm.speculative_config={"model":"m"}'], "does not go with vllm.speculative_config"),
        (["algo.rejection=seq_sum_k1", "algo.rejection_high=2", "algo.rejection_low=3"], "every sample would be dropped"),
        (["algo.rejection=seq_sum_k1", "algo.rejection_high=0.5"], "rejection_low 2 is above rejection_high 0.5"),
        (["reward.post_process=m:f", "algo.overlong_filter=true"], "reward.post_process turns rewards into numbers itself"),
        (["algo.advantage_estimator=remax", "rollout.function=m:f"], "nothing samples the greedy ones"),
        (["algo.advantage_estimator=gae", "train.steps=3", "algo.num_critic_only_steps=3"], "leaves none of train.steps = 3"),
        (["algo.advantage_estimator=gae", "parallel.tp=2"], "a critic is trained on fsdp ranks only"),
        (["algo.advantage_estimator=gae", "algo.critic_ranks=1", "algo.kl_coef=0.1"], "algo.critic_ranks does not go with algo.kl_coef"),
        (["algo.advantage_estimator=gae", "algo.critic_ranks=1", "train.stream=true"], "train.stream trains on parts of a step"),
        (["algo.advantage_estimator=gae", "algo.critic_ranks=1", "train.objective=sft"], "leave out .*algo.critic_ranks"),
        (["algo.critic_ranks=1"], 'algo.critic_ranks has no effect without algo.advantage_estimator = "gae": leave it out'),
        (["lora.alpha=3"], "lora.rank is unset"),
        (["lora.rank=4", "lora.target_modules=[]"], "lora.target_modules: Value should have at least 1 item"),
        (["lora.rank=4", "parallel.tp=2"], "lora.rank does not go with parallel, tp 2: adapters are trained on fsdp ranks only"),
        (["lora.rank=4", "parallel.ep=2"], "lora.rank does not go with parallel, ep 2"),
        (["lora.rank=4", "parallel.cp=2"], "lora.rank does not go with parallel, cp 2"),
        (["lora.rank=4", "parallel.pp=2"], "lora.rank does not go with parallel, pp 2"),
        (["lora.rank=4", "algo.advantage_estimator=gae"], "a critic has no adapters"),
        (["lora.rank=4", "rollout.routing_replay=true"], "lora.rank does not go with rollout.routing_replay"),
        (["lora.rank=4", "lora.publish=adapter", "weights.transport=nccl"], r'lora.publish = "adapter", which .*: set weights.transport to "shm" or "file"'),
        (["lora.rank=4", "lora.publish=adapter", "weights.delta=true", "train.dtype=bfloat16"], "leave out weights.delta"),
        (["lora.rank=4", "lora.publish=adapter", "vllm.speculative_config={}"], "leave out vllm.speculative_config"),
        (["lora.rank=600", "lora.publish=adapter"], "600 is more than vLLM's 512"),
        (["algo.critic_lr=1e-3"], 'algo.critic_lr has no effect without algo.advantage_estimator = "gae": leave it out'),
        (["algo.dpo_beta=0.3"], 'algo.dpo_beta has no effect without train.objective = "dpo"'),
        (["algo.policy_loss=cispo", "algo.eps_clip_c=3"], "algo.eps_clip_c has no effect without algo.policy_loss"),
        (["weights.delta_full_every=3"], "weights.delta_full_every has no effect without weights.delta"),
        (["train.objective=sft", "train.min_lr=1e-7"], "train.min_lr has no effect without train.lr_decay_style"),
        (["lora.rank=4", "lora.target_modules=q_proj"], r"lora.target_modules: Input should be a valid list \(got 'q_proj'\)$"),
        (["data_plane.backend=mooncake", "data_plane.mooncake.master=http://x:1"], r"data_plane.mooncake.master 'http://x:1' is not of the form host:port"),
        (["algo.advantage_estimator=on_policy_distillation"], "needs algo.ref_model, the teacher"),
        (["algo.advantage_estimator=on_policy_distillation", "algo.ref_model=m", "algo.kl_coef=1"], "nothing but the KL to the teacher"),
        (["train.objective=sft", "rollout.top_k=3", "eval.datasets=[{name='a', prompts='p'}]"], r"leave out rollout.top_k, eval.datasets"),
        (["train.objective=dpo", "loss.aggregate=token-mean", "vllm.port=80"], r"leave out vllm, loss.aggregate"),
        (["reward.overlong_buffer_len=300"], "overlong_buffer_len 300 is longer than rollout.max_response_len 256"),
        (["eval.datasets=[{name='a/b', prompts='p'}]"], "eval.datasets.0.name"),
        (["reward.function=regex"], "needs reward.pattern"),
        (["train"], "not of the form"),
        (["seed.x=1"], "seed is not a section"),
        (["train.lr=nan"], "train.lr"),
        (["seed=12345678901234567890123456"], r"seed: a number of more than 64 bits \(got 12345678901234567890123456\)"),
        (["seed=4000000000"], r"seed: Input should be less than 2147483648 \(got 4000000000\)"),
        (["train.steps=12345678901234567890123456"], "train.steps: a number of more than 64 bits"),
        (["rollout.request_timeout=1e300"], "rollout.request_timeout: Input should be less than or equal to"),
        (["lora.rank=true"], "lora.rank: a number is wanted, not true or false"),
        (["data_plane.timeout=true"], "data_plane.timeout: a number is wanted"),
        (["seed=-1"], "seed: Input should be greater"),
        (["rollout.request_timeout=0.5"], "rollout.request_timeout: Input should be greater than or equal to 1"),
        (["rollout.stop=['x', '']"], "rollout.stop.1: String should have at least 1 character"),
        (["rollout.stop_token_ids=[1, -2]"], "rollout.stop_token_ids.1: Input should be greater than or equal to 0"),
        (["vllm.port=65535", "rollout.num_engines=2"], "vllm.port 65535: 2 servers take as many ports"),
        (["vllm.port=8000", "rollout.num_engines=3", "router.port=8002"], "router.port 8002 is one of the ports 8000 to 8002"),
        (["rollout.temperature=inf"], "rollout.temperature"),
    ],
)
def test_settings_that_do_not_fit_together(tmp_path: Path, overrides: list[str], said: str) -> None:
    with pytest.raises(VimeError, match=said):
        config.load(write(tmp_path, "seed = 1"), overrides)


def test_rejection_bounds() -> None:
    """Ratios are bounded on both sides, divergences from above, however small the bound."""
    k1 = config.validate(BASE | {"algo": {"rejection": "seq_mean_k1", "rejection_high": 2.0}}, "t").algo
    assert k1.rejection_bounds == (0.5, 2.0)
    assert config.validate(BASE | {"algo": {"rejection": "seq_mean_k3", "rejection_high": 0.01}}, "t").algo.rejection_bounds[1] == 0.01


@pytest.mark.parametrize(
    ("text", "keys", "value"),
    [
        ("train.lr=1e-6", ["train", "lr"], 1e-6),
        ("name=demo-2", ["name"], "demo-2"),
        ("data.prompts=a=b.jsonl@[0:3]", ["data", "prompts"], "a=b.jsonl@[0:3]"),
        ("rollout.engines=['http://h:1']", ["rollout", "engines"], ["http://h:1"]),
        ("vllm.enforce-eager=true", ["vllm", "enforce-eager"], True),
        ("reward.pattern=\\d+", ["reward", "pattern"], "\\d+"),
        ("name=", ["name"], ""),
    ],
)
def test_overrides_are_toml_or_text(text: str, keys: list[str], value: Any) -> None:
    assert config.parse_override(text) == (keys, value)


def test_overrides_win_and_make_sections(tmp_path: Path) -> None:
    cfg = config.load(write(tmp_path, "[train]\nlr = 1.0"), ["train.lr=2e-5", "vllm.max_num_seqs=8", "eval.datasets=[{name='e', prompts='e.jsonl'}]"])
    assert (cfg.train.lr, cfg.vllm, cfg.eval.datasets[0].prompts) == (2e-5, {"max_num_seqs": 8}, "e.jsonl")


def test_eval_datasets_inherit_key_by_key_and_are_named_apart() -> None:
    two: list[dict[str, Any]] = [{"name": "a", "prompts": "a.jsonl", "temperature": 0.0}, {"name": "b", "prompts": "b.jsonl", "top_k": 5}]
    given = {"temperature": 0.7, "n_samples_per_prompt": 4, "datasets": two}
    a, b = config.validate(BASE | {"eval": given}, "t").eval.datasets
    assert (a.temperature, a.top_k, a.n_samples_per_prompt, a.solved) == (0.0, None, 4, 1.0)
    assert (b.temperature, b.top_k, b.max_response_len) == (0.7, 5, None)
    with pytest.raises(VimeError, match="several datasets are named a"):
        config.validate(BASE | {"eval": {"datasets": [two[0], two[0]]}}, "t")
    with pytest.raises(VimeError, match=r"eval\.datasets\.1\.promts: unknown key; did you mean 'prompts'"):
        config.validate(BASE | {"eval": {"datasets": [two[0], {"name": "b", "promts": "x"}]}}, "t")


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "no such configuration file"), (b"a = ", "readable TOML"), (b"\xff", "readable TOML"),
     (b"a = " + b"[" * 9999, "readable TOML"), (b"a = " + b"1" * 5000, "readable TOML")]
)
def test_files_that_cannot_be_read(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "r.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(VimeError, match=said):
        config.load(path)


scalars = st.booleans() | st.integers(-(2**40), 2**40) | st.text(max_size=8) | st.floats(allow_nan=False, allow_infinity=False)


values = scalars | st.lists(scalars, max_size=2) | st.dictionaries(st.text("ab", min_size=1), scalars, max_size=2)
trees = st.fixed_dictionaries({
    "train": st.fixed_dictionaries({"lr": st.floats(1e-9, 1.0), "steps": st.integers(1, 10**6)}),
    "rollout": st.fixed_dictionaries({"stop": st.lists(st.text(min_size=1, max_size=5), max_size=3)}),
    "reward": st.fixed_dictionaries({"function": st.just("regex"), "pattern": st.text(min_size=1, max_size=9)}),
    "vllm": st.dictionaries(st.text("abc-_", min_size=1), values, max_size=4),
})  # fmt: skip


@settings(deadline=None, max_examples=50)
@given(tree=trees)
def test_dump_and_load_are_inverse(tmp_path_factory: pytest.TempPathFactory, tree: dict[str, Any]) -> None:
    cfg = config.validate(BASE | tree, "t")
    path = tmp_path_factory.mktemp("c") / "c.toml"
    path.write_text(config.dump(cfg))
    assert config.load(path) == cfg


def test_the_reference_names_every_key() -> None:
    text = config.reference()

    def names(model: Any) -> list[str]:
        out = []
        for name, f in model.model_fields.items():
            section = config._section(f.annotation)
            out += names(section) if section else [name]
        return out

    missing = [n for n in names(config.Config) if f"| `{n}` |" not in text]
    assert not missing


def test_an_override_without_a_value_unsets_what_may_be_unset(tmp_path: Path) -> None:
    """Every key whose default is unset, of whatever type; others are refused rather than taken as something else."""
    given = {"rollout": {"custom_generate": "m:f"}, "algo": {"eps_clip_high": 0.3}, "eval": {"datasets": [{"name": "a", "prompts": "p", "reward": ""}]}}
    tree = write(tmp_path, "")
    tree.write_text(config.dump(config.validate(BASE | given, "t")))
    cfg = config.load(tree, ["rollout.custom_generate=", "algo.eps_clip_high=", "data.chat_template=''"])
    assert cfg.rollout.custom_generate is cfg.algo.eps_clip_high is cfg.data.chat_template is cfg.eval.datasets[0].reward is None
    for title in config.Config.model_fields:
        section = config._section(config.Config.model_fields[title].annotation)
        for name, f in section.model_fields.items() if section else ():
            if f.default is None:
                assert getattr(getattr(config.validate(BASE | {title: BASE.get(title, {}) | {name: ""}}, "t"), title), name) is None
    for key in ("seed=", "train.lr=", "train.mode=", "rollout.engines=", "rollout.sample_hook="):
        with pytest.raises(VimeError, match=key.removesuffix("=")):
            config.load(tree, [key])


@pytest.mark.parametrize("section", ["vllm", "router"])
@pytest.mark.parametrize("port", [0, -1, 65536, 10**26, "8000", "http", True, 80.0, [8000]])
def test_ports(section: str, port: Any) -> None:
    with pytest.raises(VimeError, match=rf"{section}: port = .* is no TCP port, a number from 1 to 65535; "):
        config.validate(BASE | {section: {"port": port}}, "t")
    assert config.validate(BASE | {section: {"port": 1}, "rollout": {"num_engines": 1}}, "t")


@pytest.mark.parametrize("url", ["http://h", "http://h:8000", "https://a.b-c.d:1", "http://127.0.0.1:65535", "http://[::1]:8000", "http://a_b:80"])
def test_urls_of_servers(url: str) -> None:
    assert config.validate(BASE | {"rollout": {"engines": [url]}}, "t").rollout.engines == [url]
    with pytest.raises(VimeError, match="is there 2 times: one entry a server"):
        config.validate(BASE | {"rollout": {"engines": [url, url.upper().replace("HTTPS", "https").replace("HTTP", "http")]}}, "t")


@pytest.mark.parametrize(
    "url",
    ["h:8000", "h", "http://h:8000/", "https://h:9/v1", "", "http://", "http://h:99999", "http://h:x", "ftp://h:1", "http://h:1?a=1", "http://u:p@h:1",
     " http://h:1", "http://[::1", "http://h 1:2", "http://h:0"],
)  # fmt: skip
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(VimeError) as e:
        config.validate(BASE | {"rollout": {"engines": ["http://fine:1", url]}}, "t")
    (line,) = str(e.value).splitlines()[1:]
    assert f"rollout.engines: {url!r} is not the URL of a server; write it as http://host:8000" in line


def test_each_fault_has_its_line_whichever_check_found_it() -> None:
    tree = BASE | {"rollout": {"engines": ["a", "b"], "stop": [""]}, "seed": -1, "vllm": {"port": "x"}}
    with pytest.raises(VimeError, match="t: 5 faults") as e:
        config.validate(tree, "t")
    assert len(str(e.value).splitlines()) == 6
    with pytest.raises(VimeError, match="t: 2 faults") as e:
        config.validate(BASE | {"parallel": {"fsdp": 3}, "train": {"max_staleness": 1}}, "t")
    assert len(str(e.value).splitlines()) == 3


def test_what_the_store_of_samples_lacks_here_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from vime import conflicts

    monkeypatch.setattr(conflicts, "find_spec", lambda name: None)
    monkeypatch.setattr(conflicts.ctypes, "CDLL", lambda name: Path(f"/nowhere/{name}").read_bytes())
    tree = BASE | {"data_plane": {"backend": "transferqueue", "transferqueue": {"storage": "mooncake"}}}
    with pytest.raises(VimeError) as e:
        config.validate(tree, "run.toml")
    for said in ("needs the package mooncake", "needs the package transfer_queue", "libibverbs.so.1, also over TCP: apt-get install libibverbs1"):
        assert said in str(e.value)
