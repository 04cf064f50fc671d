"""Which settings learn where. The flags' own defaults are those for Atari on a small machine;
here is what differs from them for other environments, and the paper's settings.

Each value was found by running it (docs/results.md).
"""

from typing import Any

from libtorchbeast.rows import Spec
from libtorchbeast.specs import split_mask
from libtorchbeast.tree import leaves_of
from torchbeast.envs import REMOTE, EnvOptions, is_atari, look_at
from torchbeast.errors import UsageError
from torchbeast.models.factory import choose_encoder
from torchbeast.models.frames import find_layout

# Small observations: steps are cheap, small nets bear large learning rates. Rewards are of any
# size, from 1 a step to 100 at the end, hence scaled; the values' loss must not drown the policy's.
VECTOR = {
    "total_steps": 500_000,
    "learning_rate": 0.003,
    "baseline_cost": 0.05,
    "entropy_cost": 0.01,
    "normalize_rewards": True,
}

# Actions that are floats: their likelihood changes fast, so smaller steps, and inputs and rewards
# of a known size.
FLOAT_ACTIONS = {
    "total_steps": 1_000_000,
    "learning_rate": 0.001,
    "baseline_cost": 0.5,
    "entropy_cost": 0.001,
    "normalize_observations": True,
    "normalize_rewards": True,
}

# Scores of games differ by orders of magnitude. Elsewhere rewards are learnt from as they are.
ATARI = {"reward_clipping": "abs_one"}

# IMPALA's settings for Atari: Espeholt et al. 2018, appendix D.
PAPER = {
    "total_steps": 50_000_000,
    "batch_size": 32,
    "unroll_length": 20,
    "learning_rate": 0.0006,
    "entropy_cost": 0.01,
    "epsilon": 0.1,  # the paper's 0.01 stands under the root with the mean of squares
    "vtrace_lambda": 1.0,
    "episodic_life": True,
    "reward_clipping": "abs_one",
    "model": "deep",
    "envs_per_actor": 16,
}


def find(
    options: EnvOptions, recipe: str, model: str = "auto", spec: Spec | None = None
) -> dict[str, Any]:
    """What differs from the flags' own defaults for such environments and this model."""
    if recipe == "paper":
        return PAPER
    if recipe != "default":
        raise UsageError(f"--recipe must be default or paper, got {recipe!r}.")
    if options.env == REMOTE:
        return {} if spec is None else _for_frames(spec, model)
    changes = _for_frames(look_at(options) if spec is None else spec, model)
    return {**changes, **ATARI} if is_atari(options) else changes


def _for_frames(spec: Spec, model: str) -> dict[str, Any]:
    """By the encoder that these frames get; one's own model has what `auto` would have."""
    if any("float" in leaf.dtype for _, leaf in leaves_of(spec.action)):
        return FLOAT_ACTIONS
    if ":" in model:
        frame, _ = split_mask(spec.observation)
        is_image = any(find_layout(leaf.shape) is not None for _, leaf in leaves_of(frame))
    else:
        is_image = choose_encoder(model, spec) != "mlp"
    return {} if is_image else VECTOR
