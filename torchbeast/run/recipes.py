"""Which settings learn where. The flags' own defaults are IMPALA's, for a small machine; here is
what differs from them for each kind of environment, and the paper's settings.

Each value was found by running it (docs/results.md).
"""

from typing import Any

from libtorchbeast.rows import Spec
from libtorchbeast.specs import split_mask
from libtorchbeast.tree import leaves_of
from torchbeast.envs import REMOTE, EnvOptions, is_atari
from torchbeast.models.factory import choose_encoder
from torchbeast.models.frames import find_layout

# Small observations, PPO's way: steps are cheap, and so are updates, so each batch is learnt from
# several times, within a clip. Environments wait for the learner, and there is one for each place
# in a batch, so that the policy that learns is the one that acted. Rewards are of any size, from 1
# a step to 100 at the end, hence scaled. Why importance weights are hardly clipped is in
# docs/architecture.md.
VECTOR = {
    "total_steps": 1_000_000,
    "unroll_length": 64,
    "batch_size": 32,
    "hold_actors": True,
    "num_passes": 4,
    "num_minibatches": 16,
    "clip_ratio": 0.2,
    "normalize_advantages": True,
    "normalize_rewards": True,
    "separate_nets": True,
    "discounting": 0.995,
    "vtrace_lambda": 0.98,
    "clip_rho_threshold": 4.0,
    "clip_pg_rho_threshold": 4.0,
    "clip_c_threshold": 4.0,
    "optimizer": "adam",
    "learning_rate": 0.0005,
    "entropy_cost": 0.01,
}

# Actions that are floats: the deviation of the draws is exploration enough.
FLOAT_ACTIONS = {
    **VECTOR,
    "num_passes": 10,
    "discounting": 0.99,
    "vtrace_lambda": 0.95,
    "entropy_cost": 0.0,
    "normalize_observations": True,
}

# Pictures, PPO's way, too. Here steps and updates are dear alike, so nobody waits for anybody: one
# batch is played while another is learnt from (on two cores there are as many environments as
# places in a batch). Many small parts cost no more than a few large ones. Pixels are normalised, so
# that a net sees what moves from the first update on; its baseline is soon good enough for a small
# lambda, with which advantages have less noise. Rewards are scaled, as those of vectors are.
IMAGE = {
    "unroll_length": 64,
    "batch_size": 32,
    "num_passes": 2,
    "num_minibatches": 16,
    "clip_ratio": 0.15,
    "normalize_advantages": True,
    "vtrace_lambda": 0.9,
    "clip_rho_threshold": 4.0,
    "clip_pg_rho_threshold": 4.0,
    "clip_c_threshold": 4.0,
    "optimizer": "adam",
    "learning_rate": 0.0008,
    "entropy_cost": 0.01,
    "normalize_images": True,
    "normalize_rewards": True,
}

# Pictures with float actions: IMPALA's way, as the flags' own defaults.
IMAGE_FLOAT_ACTIONS = {"entropy_cost": 0.001, "normalize_rewards": True}

# Our own image nets have their memory and heads in float32 all the same. Nobody knows of others',
# which are shown frames as they are.
FAST_CONVOLUTIONS = {"autocast": "auto"}
OTHERS_NETS = {"normalize_images": False}

# Scores of games differ by orders of magnitude, also within a game. Once clipped, rewards need no
# other scale.
ATARI = {"reward_clipping": "abs_one", "normalize_rewards": False}

# IMPALA's settings for Atari: Espeholt et al. 2018, appendix D.
PAPER = {
    "total_steps": 50_000_000,
    "batch_size": 32,
    "unroll_length": 20,
    "learning_rate": 0.0006,
    "entropy_cost": 0.01,
    "epsilon": 0.1,  # the paper's 0.01 stands under the root with the mean of squares
    "vtrace_lambda": 1.0,
    "reward_clipping": "abs_one",
    "model": "deep",
    "envs_per_actor": 16,
}


def find(
    options: EnvOptions, recipe: str, model: str = "auto", spec: Spec | None = None
) -> dict[str, Any]:
    """What differs from the flags' own defaults for such environments and this model; without a
    `spec` nobody knows yet."""
    if recipe == "paper":
        return PAPER
    if spec is None:
        return {}
    changes = _for_frames(spec, model)
    if options.env == REMOTE:
        return changes
    return {**changes, **ATARI} if is_atari(options) else changes


def _for_frames(spec: Spec, model: str) -> dict[str, Any]:
    """By the encoder that these frames get; one's own model has what `auto` would have."""
    is_own = ":" in model
    if is_own:
        frame, _ = split_mask(spec.observation)
        is_image = any(find_layout(leaf.shape) is not None for _, leaf in leaves_of(frame))
    else:
        is_image = choose_encoder(model, spec) != "mlp"
    if any("float" in leaf.dtype for _, leaf in leaves_of(spec.action)):
        changes = IMAGE_FLOAT_ACTIONS if is_image else FLOAT_ACTIONS
    else:
        changes = IMAGE if is_image else VECTOR
    if not is_image:
        return changes
    return {**changes, **(OTHERS_NETS if is_own else FAST_CONVOLUTIONS)}
