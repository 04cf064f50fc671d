"""From the name given with --model, and what environments are like, to an agent."""

import importlib
from dataclasses import replace
from typing import Any

from torch import nn

from libtorchbeast.rows import Spec
from libtorchbeast.specs import ArraySpec, describe, split_mask
from libtorchbeast.tree import leaves_of, map_tree
from torchbeast.core.distributions import Distribution, make_distribution
from torchbeast.errors import UsageError
from torchbeast.models.agent import Agent
from torchbeast.models.encoders import ENCODERS
from torchbeast.models.frames import MIN_IMAGE_SIDE, find_layout
from torchbeast.models.normalization import NormalizedObservations


def build_model(flags: Any, spec: Spec) -> nn.Module:
    """The agent that flags ask for."""
    return make_model(
        flags.model, spec, flags.use_lstm, flags.normalize_observations, flags.squash_actions
    )


def build_distribution(flags: Any, spec: Spec) -> Distribution:
    """What the agent's `policy_logits` are the parameters of."""
    return _distribution_of(spec, flags.squash_actions)


def make_model(
    name: str,
    spec: Spec,
    use_lstm: bool,
    normalize_observations: bool = False,
    squash_actions: bool = False,
) -> nn.Module:
    """An agent for environments that are like `spec`.

    Args:
        name: auto, shallow, deep, mlp, or `package.module:Class` for one's own, which is called
            with the frame's shape (a tree of shapes for tree observations), the number of
            `policy_logits` (for Discrete actions their number) and `use_lstm`, and behaves as
            `Agent` does.
        normalize_observations: show it frames at a running mean of 0 and deviation of 1.
        squash_actions: see `torchbeast.core.distributions.make_distribution`.
    """
    if not normalize_observations:
        return _make_agent(name, spec, use_lstm, squash_actions)
    # The agent is shown other numbers than the environment's.
    normalized = replace(spec, observation=map_tree(_without_float_bounds, spec.observation))
    agent = _make_agent(name, normalized, use_lstm, squash_actions)
    return NormalizedObservations(agent, spec.observation)


def _make_agent(name: str, spec: Spec, use_lstm: bool, squash: bool) -> nn.Module:
    num_params = _distribution_of(spec, squash).num_params
    if ":" in name:
        frame_shape = map_tree(lambda leaf: leaf.shape, spec.observation)
        return _import_model(name)(frame_shape, num_params, use_lstm)
    encoder = choose_encoder(name, spec)
    return Agent(spec.observation, spec.action, use_lstm, encoder, squash=squash)


def _distribution_of(spec: Spec, squash: bool) -> Distribution:
    try:
        return make_distribution(spec.action, squash)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _without_float_bounds(leaf: ArraySpec) -> ArraySpec:
    return ArraySpec(leaf.dtype, leaf.shape) if "float" in leaf.dtype else leaf


def choose_encoder(name: str, spec: Spec) -> str:
    """`auto` is the shallow net for what looks like an image, the MLP for vectors and boards."""
    if name != "auto":
        return name
    frame, _ = split_mask(spec.observation)
    encoders = {_encoder_for(leaf) for _, leaf in leaves_of(frame)}
    return "shallow" if "shallow" in encoders else "mlp"


def _encoder_for(frame: ArraySpec) -> str:
    if find_layout(frame.shape) is not None:
        return "shallow"
    large = [n for n in frame.shape if n >= MIN_IMAGE_SIDE]
    if len(large) < 2:
        return "mlp"
    raise UsageError(
        f"Observations {describe(frame)} may be images, but which dimensions are height and width "
        "cannot be guessed; say --model shallow (channels first), --model mlp, or give your own "
        "with --model package.module:Class."
    )


def check_model(name: str) -> None:
    """Raise UsageError unless `name` names a model."""
    if ":" in name:
        _import_model(name)
    elif name not in ("auto", *ENCODERS):
        raise UsageError(
            f"--model must be auto, {', '.join(ENCODERS)} or package.module:Class, got {name!r}."
        )


def _import_model(name: str) -> Any:
    module_name, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"--model {name}: cannot be imported ({error}).") from error
