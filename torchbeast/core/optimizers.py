"""Makes the optimizer that the settings name, and restores its state after a resume."""

import functools
import inspect
from typing import Any

import torch
from torch import nn

from torchbeast.core.settings import Settings


def make_optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """Make the optimizer that the settings name."""
    kinds: dict[str, Any] = {
        "rmsprop": torch.optim.RMSprop,
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "sgd": torch.optim.SGD,
    }
    options = {"lr": settings.learning_rate, **options_of(settings)}
    parameters = list(model.parameters())
    kind: Any = without_compiler(kinds[settings.optimizer])
    fastest = _fastest(settings, parameters)
    optimizer: torch.optim.Optimizer = kind(parameters, **options, **fastest)
    if isinstance(optimizer, torch.optim.RMSprop):
        start_gently(optimizer)
    return optimizer


def _fastest(settings: Settings, parameters: list[nn.Parameter]) -> dict[str, bool]:
    """Options for PyTorch's fastest implementation of the optimizer's step.

    On a CPU, too, `foreach` takes two thirds of a plain loop's time, and `fused` a third of that.
    SGD with momentum is not fused: there PyTorch requires all weights to get their first gradients
    at once, and a part of a model may be used later than the rest.
    """
    is_fusible = settings.optimizer in ("adam", "adamw") or (
        settings.optimizer == "sgd" and settings.momentum == 0
    )
    has_fused = is_fusible and all(
        p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in parameters
    )
    return {"foreach": not has_fused} | ({"fused": True} if has_fused else {})


@functools.cache
def without_compiler(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """The same optimizer without importing PyTorch's compiler, which takes half of the start-up.

    It lacks PyTorch's wrappers of its methods, which are for optimizers that are compiled.
    """
    names = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in names}
    methods["step"] = torch.no_grad()(inspect.unwrap(kind.step))
    return type(kind.__name__, (kind,), methods)


def options_of(settings: Settings) -> dict[str, Any]:
    """The optimizer's options in the settings, without the learning rate."""
    if settings.optimizer == "rmsprop":
        return {
            "alpha": settings.alpha,
            "momentum": settings.momentum,
            "eps": settings.epsilon,
        }
    if settings.optimizer == "sgd":
        return {"momentum": settings.momentum}
    options = {"eps": settings.adam_epsilon}
    if settings.optimizer == "adamw":
        options["weight_decay"] = settings.weight_decay
    return options


def load_optimizer(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], settings: Settings, lr: float
) -> None:
    """Load a saved state; options and learning rate are those of the current settings."""
    how = {k: optimizer.defaults[k] for k in ("foreach", "fused") if k in optimizer.defaults}
    groups = [{**group, **how} for group in state["param_groups"]]
    optimizer.load_state_dict({**state, "param_groups": groups})
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            if torch.is_tensor(value) and value.shape == parameter.shape:
                # In the weight's own memory format, as a fused step ignores strides.
                values[name] = torch.empty_like(parameter).copy_(value)
    for group in optimizer.param_groups:
        group.update(**options_of(settings), lr=lr, initial_lr=settings.learning_rate)
        if settings.optimizer == "rmsprop" and settings.momentum > 0:
            for parameter in group["params"]:
                buffer = torch.zeros_like(parameter)
                optimizer.state[parameter].setdefault("momentum_buffer", buffer)


def start_gently(optimizer: torch.optim.RMSprop) -> None:
    """Begin RMSProp's mean of squares at 1, as the implementation behind the paper's settings does.

    PyTorch begins at 0, which makes the first steps ten times the learning rate for every weight:
    enough to switch off all units of a layer for good.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = {"step": torch.tensor(0.0), "square_avg": torch.ones_like(parameter)}
            if group["momentum"] > 0:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            optimizer.state[parameter] = state
