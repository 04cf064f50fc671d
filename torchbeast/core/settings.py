"""The settings of the algorithm: what the learner needs, and nothing about runs or machines."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to learn. `torchbeast.run.flags` turns them into flags."""

    total_steps: int = 5_000_000
    """Environment steps to train for."""
    batch_size: int = 8
    """B: rollouts in one update; with --target_policy_lag, the minimum."""
    unroll_length: int = 20
    """T: steps in one rollout."""
    max_policy_lag: int | None = 1000
    """Learn nothing from rollouts whose oldest step is more updates behind; they are counted as
    dropped_rollouts."""
    autocast: Literal["none", "bf16", "auto"] = "none"
    """Precision of the learner's forward and backward pass, and of the image nets of PolyBeast's
    agent: bf16 uses bfloat16 where that is safe, auto does if the device has instructions for
    it."""
    compile: bool = False
    """Compile the model with torch.compile: slow to start, for GPUs and long runs."""

    # The loss.
    entropy_cost: float = 0.003
    """Weight of the entropy bonus."""
    baseline_cost: float = 0.5
    """Weight of the baseline's loss."""
    discounting: float = 0.99
    """Gamma: the discount factor."""
    reward_clipping: Literal["abs_one", "soft_asymmetric", "none"] = "none"
    """How rewards are clipped before they are learnt from (Atari: abs_one)."""
    normalize_rewards: bool = False
    """Divide rewards, once clipped, by the running standard deviation of the discounted return."""
    normalize_observations: bool = False
    """Normalise floats in observations by their running mean and standard deviation; integers stay
    as they are."""
    clip_rho_threshold: float = 1.0
    """Rho-bar: clip of the importance weights in V-trace's targets."""
    clip_pg_rho_threshold: float = 1.0
    """Clip of the importance weights in the policy gradient."""
    clip_c_threshold: float = 1.0
    """C-bar: clip of the importance weights that propagate later TD errors back."""
    vtrace_lambda: float = 0.95
    """Lambda, which multiplies c: 1 in the paper; with less, the baseline counts more."""

    # How often, and how far, a batch is learnt from.
    num_passes: int = 1
    """Number of passes over each batch."""
    num_minibatches: int = 1
    """Minibatches in each pass, with a step of the optimizer for each. They have whole rollouts, or
    single steps of all rollouts with --clip_ratio and one of the built-in models without memory."""
    clip_ratio: float | None = None
    """Clip of the ratio to the policy at the first pass, as in PPO; all passes then have the
    targets of the first one. None: no clip, and new targets in each pass."""
    normalize_advantages: bool = False
    """Normalise the advantages in a batch to a mean of 0 and a standard deviation of 1."""

    # The optimizer.
    optimizer: Literal["rmsprop", "adam", "adamw", "sgd"] = "rmsprop"
    """Optimizer; the paper's is rmsprop."""
    schedule: Literal["linear", "constant"] = "linear"
    """Schedule of the learning rate: linear goes to 0 at total_steps."""
    learning_rate: float = 0.0006
    """Learning rate at the start."""
    alpha: float = 0.99
    """RMSProp's smoothing constant."""
    momentum: float = 0.0
    """RMSProp's and SGD's momentum."""
    epsilon: float = 0.01
    """RMSProp's epsilon."""
    adam_epsilon: float = 1e-5
    """Adam's and AdamW's epsilon."""
    weight_decay: float = 0.01
    """AdamW's weight decay."""
    grad_norm_clipping: float = 40.0
    """Clip of the gradient's global norm."""
