"""Policy loss, KL and token logprobs: pure functions of tensors, natural logarithms throughout."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0  # beyond it exp() only overflows; inside it nothing changes
CPU_BLOCK = 2**21  # logits whose softmax is taken at once on a CPU
LossFn = Callable[[Tensor, Tensor, slice], Tensor]
Support = tuple[Tensor, Tensor]  # ids (K,) and offsets (N + 1,), int64: token i was drawn from ids[offsets[i] : offsets[i + 1]]


def policy_loss(
    log_probs: Tensor, old: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None,
    kind: str = "ppo", lengths: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Policy-gradient loss per token, and 1.0 where a bound was active; all of one shape, float32, for gspo (N,) with each sample's tokens in
    `lengths`. Gradients flow through `log_probs` only, not `old`, those before the update. "ppo": the clipped surrogate, the ratio held to [1 -
    clip_low, 1 + clip_high]. "gspo": the same with the sample's geometric mean of ratios, whose gradient falls on each token alike
    (arXiv:2507.18071, GSPO-token form). In both, a negative advantage's loss is at most -dual_clip * advantage. "cispo": -ratio * advantage *
    log_prob, the ratio held and without a gradient, so no token loses its own (arXiv:2506.13585). "gpg": -advantage * log_prob (arXiv:2504.02546)."""
    if kind == "gpg":
        return -advantages * log_probs, torch.zeros_like(log_probs)
    log_ratio = log_probs - old
    if kind == "gspo":
        log_ratio = of_samples(log_ratio.detach(), lengths) + (log_probs - log_probs.detach())
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    held = ratio.clamp(1 - clip_low, 1 + clip_high)
    if kind == "cispo":
        return -held.detach() * advantages * log_probs, (held != ratio).float()
    plain, clipped = -ratio * advantages, -held * advantages
    loss = torch.maximum(plain, clipped)
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(-dual_clip * advantages, loss), loss)
    return loss, (clipped > plain).float()


def of_samples(x: Tensor, lengths: Sequence[int], how: str = "mean") -> Tensor:
    """Each sample's mean, sum or maximum of `x` (N,), repeated for its tokens. The samples lie one after another, `lengths` tokens each."""
    n = torch.tensor(lengths, device=x.device, dtype=torch.int64)
    sample = torch.repeat_interleave(torch.arange(len(n), device=x.device), n)
    if how == "max":
        return x.new_full((len(n),), -torch.inf).scatter_reduce(0, sample, x, "amax")[sample]
    total = x.new_zeros(len(n)).index_add_(0, sample, x)
    return (total / n.clamp(min=1) if how == "mean" else total)[sample]


def rejection_mask(old: Tensor, rollout: Tensor, lengths: Sequence[int], kind: str, low: float, high: float) -> Tensor:
    """1.0 for tokens of samples that are kept, 0.0 where trainer (`old`) and servers (`rollout`) are too far apart; all (N,) float32. kind
    (of verl's rollout_rs): seq_{sum,mean,max}_{k1,k2,k3}, the sample's sum, mean or maximum over d = old - rollout: with k1 of d, whose exp
    must lie in [low, high]; k2 of d^2 / 2, k3 of exp(d) - 1 - d, at most `high`."""
    _, how, divergence = kind.split("_")
    d = (old - rollout).detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if divergence == "k1":
        ratio = of_samples(d, lengths, how).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        return ((ratio >= low) & (ratio <= high)).float()
    return (of_samples(d * d / 2 if divergence == "k2" else d.exp() - 1 - d, lengths, how) <= high).float()


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """A critic's loss per token, and 1.0 where clipped: half the larger squared error, of the value or of it held within `clip` of the old one."""
    plain = (values - returns) ** 2
    if clip is None:
        return plain / 2, torch.zeros_like(values)
    clipped = (torch.minimum(torch.maximum(values, old_values - clip), old_values + clip) - returns) ** 2
    return torch.maximum(plain, clipped) / 2, (clipped > plain).float()


def dpo_loss(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """-log sigmoid(beta (chosen - rejected)) of pairs (P,) of sums of log(policy / reference) (Rafailov et al. 2023, the sigmoid form)."""
    return -torch.nn.functional.logsigmoid(beta * (chosen - rejected))


def importance_weights(old: Tensor, rollout: Tensor, kind: str, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Weights of the token losses that correct for another sampling policy, and the ratios before truncation, without a gradient, from
    trainer's (`old`) and servers' (`rollout`) logprobs, float32 of one shape. "tis": exp(old - rollout) clamped to [low, high] (truncated
    importance sampling, Yao et al. 2025); "icepop": 0 outside (IcePop, Ling team 2025)."""
    ratio = (old - rollout).detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    if kind == "tis":
        return ratio.clamp(low, high), ratio
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0), ratio


def opsm_mask(log_probs: Tensor, old: Tensor, advantages: Tensor, lengths: Sequence[int], delta: float) -> Tensor:
    """Off-policy sequence masking (DeepSeek-V3.2, slime's estimate): 0.0 for tokens with a negative advantage where mean(old - log_probs) >
    `delta`."""
    drift = of_samples((old - log_probs).detach(), lengths)
    return 1.0 - ((advantages < 0) & (drift > delta)).float()


def kl(log_probs: Tensor, ref: Tensor, kind: str) -> Tensor:
    """Per-token estimate of KL(policy || reference), differentiable in `log_probs`. "k1" = d, "k2" = d^2 / 2, "k3" = exp(-d) - 1 + d with d =
    log_probs - ref; "low_var_kl" = k3 held within +-10; "abs" = |d|, which is no estimate of the KL, but verl has it."""
    d = log_probs - ref
    if kind == "abs":
        return d.abs()
    if kind == "k1":
        return d
    if kind == "k2":
        return d * d / 2
    d = d.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    k3 = torch.exp(-d) - 1 + d
    return k3 if kind == "k3" else k3.clamp(-10, 10)


def token_log_probs(logits: Tensor, labels: Tensor, temperature: float, rows: Tensor | None = None, ids: Tensor | None = None) -> tuple[Tensor, ...]:
    """log_probs (N,), entropy (N,), logp (N, V), p (N, V) in float32 of logits (N, V), divided by `temperature` first; labels (N,) int64.
    Where token rows[k] was drawn from ids[k], for all k, and from nothing else, log_probs are over these ids only, and the last result is
    their probabilities q (K,), else p. The others are always over the whole vocabulary."""
    logits = logits.float()
    logp = torch.log_softmax(logits / temperature if temperature != 1 else logits, -1)
    p = logp.exp()
    lp, entropy = logp.gather(1, labels[:, None])[:, 0], -torch.linalg.vecdot(p, logp)
    if rows is None or ids is None:
        return lp, entropy, logp, p, p
    part = logp[rows, ids]
    top = lp.scatter_reduce(0, rows, part, "amax")
    norm = top + torch.zeros_like(lp).index_add_(0, rows, (part - top[rows]).exp()).log()
    return lp - norm, entropy, logp, p, (part - norm[rows]).exp()


def support_of(support: Support | None, part: slice) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """The rows (counted from the start of the slice) and ids of the slice's tokens, for chunk_log_probs."""
    if support is None:
        return None, None
    ids, offsets = support
    ends = offsets[part.start : part.stop + 1]
    rows = torch.repeat_interleave(torch.arange(len(ends) - 1, device=ids.device), ends.diff())
    return rows, ids[ends[0] : ends[-1]]


def slices(part: slice, size: int) -> list[slice]:
    return [slice(i, min(i + size, part.stop)) for i in range(part.start, part.stop, size)]


def block_of(logits: Tensor) -> int:
    """Tokens of a chunk whose softmax is taken at once: on a CPU few, so that float32 rows stay in its cache from one operation to the next."""
    return max(1, CPU_BLOCK // logits.shape[1]) if logits.device.type == "cpu" else len(logits)


class HeadLoss(torch.autograd.Function):
    """Vocabulary projection, log-softmax and loss in one, a chunk of tokens at a time: the (tokens, vocabulary) logits never exist whole, and
    a chunk's become its gradient in place, so that backward() only scales what forward() found."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, chunk: int, loss_fn: LossFn, use_entropy: bool,
        support: Support | None = None, whole: bool = False,
    ) -> Tensor:  # fmt: skip
        """hidden (N, D), weight (V, D), labels (N,) -> the scalar sum of losses, float32. `loss_fn(log_probs, entropy, tokens)` gets leaf
        tensors of the tokens that the slice `tokens` names and returns their summed loss. use_entropy: does it depend on it? support: what
        each token was drawn from. whole: call loss_fn once, for all tokens; more than one chunk are then projected twice."""
        d_hidden = torch.zeros_like(hidden)
        d_weight: Tensor | None = None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        everything = slice(0, len(labels))
        parts = slices(everything, chunk)

        def look(z: Tensor, part: slice, block: slice) -> tuple[Tensor, ...]:
            own = z[block.start - part.start : block.stop - part.start]
            return own, *token_log_probs(own, labels[block], temperature, *support_of(support, block))

        def gradient(lp: Tensor, entropy: Tensor, block: slice) -> tuple[Tensor, Tensor]:
            lp, entropy = lp.requires_grad_(), entropy.clone().requires_grad_()
            with torch.enable_grad():
                loss = loss_fn(lp, entropy, block)
            total.add_(loss.detach())
            return torch.autograd.grad(loss, (lp, entropy), materialize_grads=True)

        ahead, z = None, hidden[:0]
        if whole and parts:
            found = []
            for part in parts:
                z = hidden[part] @ weight.T
                found += [look(z, part, block)[1:3] for block in slices(part, block_of(z))]
            lps, entropies = zip(*found)
            ahead = gradient(torch.cat(lps), torch.cat(entropies), everything)
        for part in parts:
            if ahead is None or len(parts) > 1:
                z = hidden[part] @ weight.T
            for block in slices(part, block_of(z)):
                own, lp, entropy, logp, p, q = look(z, part, block)
                g_lp, g_ent = gradient(lp, entropy, block) if ahead is None else (g[block] for g in ahead)
                rows, ids = support_of(support, block)
                shared = torch.zeros_like(g_lp) if rows is not None else g_lp  # of dlp/dz_j = [j = label] - q_j, q_j is p_j or apart
                if use_entropy:  # dH/dz_j = -p_j (log p_j + H)
                    g = p.mul_(logp.add_(entropy[:, None]).mul_(-g_ent[:, None]).sub_(shared[:, None]))
                else:
                    g = p.mul_(-shared[:, None])
                if rows is not None:
                    g.index_put_((rows, ids), -g_lp[rows] * q, accumulate=True)
                g.scatter_add_(1, labels[block, None], g_lp[:, None])
                own.copy_(g.div_(temperature) if temperature != 1 else g)
            d_hidden[part] = z @ weight
            if ctx.needs_input_grad[1]:
                new = z.T @ hidden[part]
                d_weight = new if d_weight is None else d_weight.float().add_(new)  # chunks add up in float32
        if ctx.needs_input_grad[1]:
            d_weight = torch.zeros_like(weight) if d_weight is None else d_weight.to(weight.dtype)
        ctx.save_for_backward(d_hidden, d_weight)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        d_hidden, d_weight = ctx.saved_tensors
        scale = float(grads[0])
        if scale != 1.0:  # in place: a second backward() through the same forward is not supported, nor needed
            d_hidden = d_hidden.mul_(scale)
            d_weight = None if d_weight is None else d_weight.mul_(scale)
        return d_hidden, d_weight, None, None, None, None, None, None, None


def head_log_probs(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, chunk: int, support: Support | None = None) -> Tensor:
    """Logprobs of `labels` (N,) from hidden states (N, D) and the head's weight (V, D): float32 (N,), no gradient, chunked."""
    out = hidden.new_empty(len(labels), dtype=torch.float32)
    for part in slices(slice(0, len(labels)), chunk):
        z = hidden[part] @ weight.T
        for block in slices(part, block_of(z)):
            own = z[block.start - part.start : block.stop - part.start]
            out[block] = token_log_probs(own, labels[block], temperature, *support_of(support, block))[0]
    return out
