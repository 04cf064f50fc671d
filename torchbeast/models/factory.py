"""From the name given with --model to an agent."""

import importlib
from typing import Any

from torch import nn

from torchbeast.errors import UsageError
from torchbeast.models.agent import Agent
from torchbeast.models.encoders import ENCODERS
from torchbeast.models.normalization import NormalizedObservations

MIN_IMAGE_SIDE = 36  # smaller boards are left to the MLP


def make_model(
    name: str,
    frame_shape: Any,
    num_actions: int,
    use_lstm: bool,
    normalize_observations: bool = False,
) -> nn.Module:
    """An agent for frames of this shape.

    Args:
        name: auto, shallow, deep, mlp, or `package.module:Class` for one's own, which is called
            with the next three arguments and behaves as `Agent` does.
        frame_shape: of one frame, without time and batch (a tree of shapes for tree observations).
        normalize_observations: show it frames at a running mean of 0 and deviation of 1.
    """
    agent = _make_agent(name, frame_shape, num_actions, use_lstm)
    return NormalizedObservations(agent, frame_shape) if normalize_observations else agent


def _make_agent(name: str, frame_shape: Any, num_actions: int, use_lstm: bool) -> nn.Module:
    if ":" in name:
        return _import_model(name)(frame_shape, num_actions, use_lstm)
    if not _is_shape(frame_shape):
        raise UsageError(
            f"The built-in models take one array as observation, got {frame_shape}; "
            "give your own with --model package.module:Class."
        )
    return Agent(frame_shape, num_actions, use_lstm, choose_encoder(name, frame_shape))


def choose_encoder(name: str, frame_shape: tuple[int, ...]) -> str:
    """`auto` is the shallow net for what looks like an image, the MLP for the rest."""
    if name != "auto":
        return name
    is_image = len(frame_shape) == 3 and sorted(frame_shape)[1] >= MIN_IMAGE_SIDE
    return "shallow" if is_image else "mlp"


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


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(n, int) for n in value)
