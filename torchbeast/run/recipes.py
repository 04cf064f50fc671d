"""Recipes: default settings for each kind of environment, and the IMPALA paper's settings.

The flags' own defaults are IMPALA's, for a small machine; a recipe has what differs from them. Each
value was found by experiment (docs/results.md).
"""

from typing import Any

from libtorchbeast.rows import Spec
from libtorchbeast.specs import split_mask
from libtorchbeast.tree import leaves_of
from torchbeast.envs import REMOTE, EnvOptions, is_atari
from torchbeast.models.factory import choose_encoder
from torchbeast.models.frames import find_layout

# Small observations, with PPO's settings: steps and updates are cheap, so each batch is learnt from
# several times, within a clip. Environments wait for the learner, and there is one for each rollout
# of a batch, so that policy lag is 0. Rewards vary, from 1 a step to 100 at the end, so they are
# scaled. docs/architecture.md says why importance weights are hardly clipped.
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

# Float actions: their standard deviation is exploration enough, without an entropy bonus.
FLOAT_ACTIONS = {
    **VECTOR,
    "num_passes": 10,
    "discounting": 0.99,
    "vtrace_lambda": 0.95,
    "entropy_cost": 0.0,
    "normalize_observations": True,
}

# Images, with PPO's settings, too. Steps and updates are both expensive, so actors do not wait: one
# batch is played while another is learnt from (on two cores there are as many environments as
# rollouts in a batch). Many small minibatches cost no more than a few large ones. Pixels are
# normalised, so that a net sees what moves from the first update on; its baseline is soon good
# enough for a small lambda, with which advantages have less noise. Rewards are scaled as above.
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

# Images with float actions: IMPALA's settings, as the flags' own defaults.
IMAGE_FLOAT_ACTIONS = {"entropy_cost": 0.001, "normalize_rewards": True}

# Built-in image nets may run in bfloat16: their memory and heads stay in float32 anyway. Models of
# the user's own run in float32, and get frames that are not normalised.
FAST_CONVOLUTIONS = {"autocast": "auto"}
OTHERS_NETS = {"normalize_images": False}

# Scores differ by orders of magnitude, between games and within one, so rewards are clipped. Then
# they need no other scale.
ATARI = {"reward_clipping": "abs_one", "normalize_rewards": False}

# IMPALA's settings for Atari: Espeholt et al. 2018, appendix D.
PAPER = {
    "total_steps": 50_000_000,
    "batch_size": 32,
    "unroll_length": 20,
    "learning_rate": 0.0006,
    "entropy_cost": 0.01,
    "epsilon": 0.1,  # the paper adds 0.01 under the root, PyTorch adds epsilon to the root
    "vtrace_lambda": 1.0,
    "reward_clipping": "abs_one",
    "model": "deep",
    "envs_per_actor": 16,
}


def find(
    options: EnvOptions, recipe: str, model: str = "auto", spec: Spec | None = None
) -> dict[str, Any]:
    """The values that differ from the flags' own defaults, for such environments and this model.

    With the default recipe there are none until the environments' `spec` is known.
    """
    if recipe == "paper":
        return PAPER
    if spec is None:
        return {}
    changes = _for_frames(spec, model)
    if options.env == REMOTE:
        return changes
    return {**changes, **ATARI} if is_atari(options) else changes


def _for_frames(spec: Spec, model: str) -> dict[str, Any]:
    """The values for the encoder that these frames get; the user's own models count as `auto`."""
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
