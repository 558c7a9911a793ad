"""The settings of algorithms: sections [algo] and [loss] of the configuration."""

from typing import Literal

from pydantic import Field

from vime.sections import Section


class AlgoConfig(Section):
    """Advantage and policy loss (names of slime)."""

    advantage_estimator: Literal[
        "grpo", "rloo", "opo", "remax", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae", "on_policy_distillation"
    ] = Field(
        "grpo",
        description="what a reward is compared with; remax samples one more response of each prompt, greedily; gae trains a critic (PPO); "
        "on_policy_distillation takes ref_model for a teacher: docs/algorithms.md",
    )
    policy_loss: Literal["ppo", "gspo", "cispo", "gpg"] = Field("ppo", description="ratios per token; gspo: per sample; cispo: as weights; gpg: none")
    normalize_std: bool = Field(True, description="of grpo: divide by the group's standard deviation (ddof 1, eps 1e-6); false: Dr.GRPO")
    normalize_advantages: bool | None = Field(None, description="whiten over the step's trained tokens; unset: for gae and both reinforce_plus_plus")
    gamma: float = Field(1.0, gt=0, le=1, description="of gae and reinforce_plus_plus: discount per token")
    lambd: float = Field(1.0, ge=0, le=1, description="of gae: 1 trusts the rewards that came, 0 the critic")
    critic_model: str | None = Field(None, description="of gae: folder whose layers the critic starts from; unset: model")
    critic_lr: float | None = Field(None, gt=0, description="of gae: the critic's learning rate, on train.lr's schedule; unset: train.lr")
    critic_ranks: int = Field(0, ge=0, description="of gae: so many more trainer ranks hold the critic, and nothing else; 0: it shares the model's")
    value_clip: float | None = Field(0.2, gt=0, description="of gae: how far a value may move from the old one before its loss is clipped; unset: off")
    num_critic_only_steps: int = Field(0, ge=0, description="of gae: first rollout steps that train the critic only")
    kl_coef: float = Field(0.0, ge=0, description="KL to the reference (of kl_loss_type) taken from each token's reward")
    overlong_filter: bool = Field(False, description="samples cut off at their length limit stay in the baseline, but are not trained")
    eps_clip: float = Field(0.2, ge=0, description="PPO clip, lower side")
    eps_clip_high: float | None = Field(None, ge=0, description="upper side; unset: the same as eps_clip")
    eps_clip_c: float | None = Field(None, gt=1, description="dual clip for negative advantages; unset: off")
    kl_loss_coef: float = Field(0.0, ge=0, description="KL to the reference in the loss; 0 loads no reference")
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl", "abs"] = "k3"
    entropy_coef: float = Field(0.0, description="entropy bonus")
    ref_model: str | None = Field(None, description="reference model folder; unset: model")
    dpo_beta: float = Field(0.1, gt=0, description='of train.objective = "dpo": scale of the log-ratios to the reference')
    correction: Literal["none", "tis", "icepop", "rollout_logprobs"] = Field(
        "none", description="off-policy: loss x exp(old - sampled logprob), clamped (tis) or 0 outside the bounds (icepop); or old = sampled"
    )
    tis_clip: float = Field(2.0, gt=0, description="upper bound of that weight")
    tis_clip_low: float | None = Field(None, ge=0, description="lower bound; unset: 0 for tis, 0.5 for icepop")
    custom_tis: str | None = Field(None, description="dotted path: (args, *, pg_loss, train_log_probs, ...) -> (pg_loss, masks, metrics), a correction")
    use_opsm: bool = Field(False, description="off-policy sequence masking: drop samples with a negative advantage that have drifted")
    opsm_delta: float = Field(1e-4, ge=0, description="mean old - new logprob from which such a sample is dropped")
    rejection: Literal["seq_sum_k1", "seq_mean_k1", "seq_sum_k2", "seq_mean_k2", "seq_max_k2", "seq_sum_k3", "seq_mean_k3", "seq_max_k3"] | None = (
        Field(None, description="drop samples whose sampled logprobs are too far from the trainer's: verl's rollout_rs")
    )
    rejection_high: float | None = Field(None, gt=0, description="of k1 the largest ratio that is kept, of k2 and k3 the largest divergence")
    rejection_low: float | None = Field(None, ge=0, description="of k1 the smallest ratio that is kept; unset: 1 / rejection_high")
    custom_advantage: str | None = Field(None, description="dotted path: (args, rollout_data) -> None, fills in advantages per token")

    @property
    def whitened(self) -> bool:
        """Whether advantages are whitened over the step."""
        auto = self.advantage_estimator.startswith(("reinforce_plus_plus", "gae"))
        return auto if self.normalize_advantages is None else self.normalize_advantages

    @property
    def per_token(self) -> bool:
        """Whether a sample's tokens have advantages of their own, or such that depend on other samples' tokens."""
        return self.whitened or self.kl_coef > 0 or self.gamma != 1 or self.advantage_estimator in ("gae", "on_policy_distillation")

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef > 0 or self.kl_loss_coef > 0 or self.advantage_estimator == "on_policy_distillation"

    @property
    def rejection_bounds(self) -> tuple[float, float]:
        """In force where `rejection` is set."""
        high = self.rejection_high or 1.0
        return 1 / high if self.rejection_low is None else self.rejection_low, high

    @property
    def tis_low(self) -> float:
        """The lower bound in force."""
        return self.tis_clip_low if self.tis_clip_low is not None else 0.5 if self.correction == "icepop" else 0.0


class LossConfig(Section):
    """How token losses become one number, or a loss of your own."""

    aggregate: Literal["sample-mean", "token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] = Field(
        "sample-mean", description="sample-mean (slime's default): mean over samples of each one's token mean; token-mean: of all tokens"
    )
    custom: str | None = Field(None, description="dotted path: (args, batch, logits, sum_of_sample_mean) -> (loss, metrics), in place of the policy loss")
    custom_reducer: str | None = Field(None, description="dotted path: (..., calculate_per_token_loss) -> function of the token losses, see docs/plugins.md")
