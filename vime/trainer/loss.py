"""Policy loss, KL and token logprobs: pure functions of tensors, natural logarithms throughout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0  # beyond it exp() only overflows; inside it nothing changes
LossFn = Callable[[Tensor, Tensor, slice], Tensor]


def policy_loss(
    log_probs: Tensor, old: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate per token. `log_probs` (float32, of the policy being trained; gradients flow through them only), `old`
    (before the update) and `advantages` have one shape.

    The ratio is clipped to [1 - clip_low, 1 + clip_high]. Where the advantage is negative the loss is at most -dual_clip * advantage.
    Returns: loss per token, and 1.0 where the clipped branch was taken (no gradient), both of that shape.
    """
    ratio = (log_probs - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    plain, clipped = -ratio * advantages, -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    loss = torch.maximum(plain, clipped)
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(-dual_clip * advantages, loss), loss)
    return loss, (clipped > plain).float()


def kl(log_probs: Tensor, ref: Tensor, kind: str) -> Tensor:
    """Per-token estimate of KL(policy || reference) from the sampled tokens' logprobs (same shapes); differentiable in `log_probs`.

    kind: "k1" = d, "k2" = d^2 / 2, "k3" = exp(-d) - 1 + d with d = log_probs - ref; "low_var_kl" = k3 held within +-10.
    """
    d = log_probs - ref
    if kind == "k1":
        return d
    if kind == "k2":
        return d * d / 2
    d = d.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    k3 = torch.exp(-d) - 1 + d
    return k3 if kind == "k3" else k3.clamp(-10, 10)


def chunk_log_probs(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log_probs (N,), entropy (N,), logp (N, V) and p (N, V) of a few tokens, in float32 whatever the inputs are: hidden (N, D),
    weight (V, D), labels (N,) int64; logits are divided by `temperature` first."""
    logp = torch.log_softmax((hidden @ weight.T).float().div_(temperature), -1)
    p = logp.exp()
    return logp.gather(1, labels[:, None])[:, 0], -torch.einsum("nv,nv->n", p, logp), logp, p


class HeadLoss(torch.autograd.Function):
    """Vocabulary projection, log-softmax and loss in one, a chunk of tokens at a time.

    The (tokens, vocabulary) logits never exist whole, and nothing is computed twice: a chunk's gradient is taken while its
    logits are at hand, so that backward() only scales what forward() found.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, chunk: int, loss_fn: LossFn, use_entropy: bool
    ) -> Tensor:
        """hidden (N, D), weight (V, D), labels (N,). `loss_fn(log_probs, entropy, tokens)` gets leaf tensors of the chunk that
        the slice `tokens` names and returns its summed loss; it may keep statistics. use_entropy: does the loss depend on it?

        Returns: the scalar sum of the chunks' losses, float32.
        """
        d_hidden = torch.zeros_like(hidden)
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start in range(0, len(labels), chunk):
            part = slice(start, min(start + chunk, len(labels)))
            h, y = hidden[part], labels[part]
            lp, entropy, logp, p = chunk_log_probs(h, weight, y, temperature)
            lp, ent = lp.requires_grad_(), entropy.clone().requires_grad_()
            with torch.enable_grad():
                loss = loss_fn(lp, ent, part)
            g_lp, g_ent = torch.autograd.grad(loss, (lp, ent), allow_unused=True)
            total += loss.detach()
            if use_entropy and g_ent is not None:  # dH/dz_j = -p_j (log p_j + H)
                g = p.mul_(logp.add_(entropy[:, None]).mul_(-g_ent[:, None]).sub_(g_lp[:, None]))
            else:
                g = p.mul_(-g_lp[:, None])
            g.scatter_add_(1, y[:, None], g_lp[:, None]).div_(temperature)  # dlp/dz_j = [j = label] - p_j
            g = g.to(hidden.dtype)
            d_hidden[part] = g @ weight
            if d_weight is not None:
                d_weight.addmm_(g.T, h) if g.dtype == torch.float32 else d_weight.add_(g.T @ h)
        ctx.save_for_backward(d_hidden, None if d_weight is None else d_weight.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        d_hidden, d_weight = ctx.saved_tensors
        scale = float(grads[0])
        if scale != 1.0:  # in place: a second backward() through the same forward is not supported, nor needed
            d_hidden = d_hidden.mul_(scale)
            d_weight = None if d_weight is None else d_weight.mul_(scale)
        return d_hidden, d_weight, None, None, None, None, None


def head_log_probs(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, chunk: int) -> Tensor:
    """Logprobs of `labels` (N,) from hidden states (N, D) and the head's weight (V, D): float32 (N,), no gradient, chunked."""
    parts = [chunk_log_probs(hidden[i : i + chunk], weight, labels[i : i + chunk], temperature)[0] for i in range(0, len(labels), chunk)]
    return torch.cat(parts) if parts else hidden.new_zeros(0, dtype=torch.float32)
