"""Which settings learn where. The flags' own defaults are those for Atari on a small machine;
here is what differs from them for other environments, and the paper's settings.

Each value was found by running it (docs/results.md).
"""

from typing import Any

from torchbeast.envs import REMOTE, EnvOptions, make_envs
from torchbeast.errors import UsageError
from torchbeast.models.factory import choose_encoder

# Small observations: steps are cheap, small nets bear large learning rates. Rewards are often one a
# step, so that values are large, and their loss must not drown the policy's.
VECTOR = {
    "total_steps": 500_000,
    "learning_rate": 0.003,
    "baseline_cost": 0.05,
    "entropy_cost": 0.01,
}

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
    "model": "deep",
    "envs_per_actor": 16,
}


def find(env: str, recipe: str) -> dict[str, Any]:
    """What differs from the flags' own defaults for this environment."""
    if recipe == "paper":
        return PAPER
    if recipe != "default":
        raise UsageError(f"--recipe must be default or paper, got {recipe!r}.")
    if env == REMOTE:
        return {}
    envs = make_envs(EnvOptions(env), num_envs=1)
    frame = envs.reset()["frame"]
    envs.close()
    is_image = hasattr(frame, "shape") and choose_encoder("auto", frame.shape[1:]) != "mlp"
    return {} if is_image else VECTOR
