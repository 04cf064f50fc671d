"""The settings of the algorithm: what the learner must know, and nothing about runs or machines."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to learn. `torchbeast.run.flags` makes flags of them."""

    total_steps: int = 5_000_000
    """Environment steps to train for."""
    batch_size: int = 8
    """B: rollouts in one update; with --target_policy_lag the fewest."""
    unroll_length: int = 20
    """T: steps in one rollout."""
    max_policy_lag: int | None = 1000
    """Learn nothing from rollouts whose oldest step is more updates behind; they are counted."""
    autocast: Literal["none", "bf16", "auto"] = "none"
    """Let the learner's forward and backward pass, and the image nets of PolyBeast's agent, run in
    bfloat16 where that is safe; auto: if the device has instructions for it."""
    compile: bool = False
    """Compile the model with torch.compile: slow to start, for GPUs and long runs."""

    # The loss.
    entropy_cost: float = 0.003
    """Weight of the entropy bonus."""
    baseline_cost: float = 0.5
    """Weight of the baseline's loss."""
    discounting: float = 0.99
    """Gamma."""
    reward_clipping: Literal["abs_one", "soft_asymmetric", "none"] = "none"
    """How rewards are clipped before they are learnt from (Atari: abs_one)."""
    normalize_rewards: bool = False
    """Divide rewards, once clipped, by the running deviation of the discounted return."""
    normalize_observations: bool = False
    """Show the agent floats at a running mean of 0 and deviation of 1; integers as they are."""
    clip_rho_threshold: float = 1.0
    """Rho-bar: clip of the importance weights in V-trace's targets."""
    clip_pg_rho_threshold: float = 1.0
    """Clip of the importance weights in the policy gradient."""
    clip_c_threshold: float = 1.0
    """C-bar: clip of the importance weights that carry later surprises back."""
    vtrace_lambda: float = 0.95
    """Multiplies c; the paper has 1, less trusts the baseline more."""

    # How often, and how far, a batch is learnt from.
    num_passes: int = 1
    """Times that each batch is learnt from."""
    num_minibatches: int = 1
    """Parts of a batch; every pass makes a step of the optimizer with each. Whole rollouts, or
    single steps of all rollouts with --clip_ratio and one of the built-in models without memory."""
    clip_ratio: float | None = None
    """Clip of the ratio to the policy at the first pass, as in PPO; targets are then those of the
    first pass, too. None: no clip, and new targets in each pass."""
    normalize_advantages: bool = False
    """Give the advantages in a batch a mean of 0 and a deviation of 1."""

    # The optimizer.
    optimizer: Literal["rmsprop", "adam", "adamw", "sgd"] = "rmsprop"
    """The paper's is rmsprop."""
    schedule: Literal["linear", "constant"] = "linear"
    """Of the learning rate: linear goes to 0 at total_steps."""
    learning_rate: float = 0.0006
    """At the start; with --schedule linear it goes to 0 at total_steps."""
    alpha: float = 0.99
    """RMSProp's smoothing."""
    momentum: float = 0.0
    """RMSProp's and SGD's momentum."""
    epsilon: float = 0.01
    """RMSProp's epsilon."""
    adam_epsilon: float = 1e-5
    """Adam's and AdamW's epsilon."""
    weight_decay: float = 0.01
    """AdamW's."""
    grad_norm_clipping: float = 40.0
    """Clip of the gradient's global norm."""
