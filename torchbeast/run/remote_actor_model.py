"""An actor's copy of a learner's model: made from plain data, and given the learner's weights."""

from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor, nn

from libtorchbeast.rpc.actor_messages import Welcome, size_of
from torchbeast.errors import UsageError
from torchbeast.models import build_distribution, build_model
from torchbeast.runtime.actor_model import prepare_to_act, tensors_of


def build_copy(welcome: Welcome, own_model: str | None = None) -> nn.Module:
    """The model that the learner describes; UsageError with one sentence if there is none.

    A name of code, `package.module:Class`, is imported only if it is `own_model`, which the actor
    was started with.
    """
    name = welcome.model["name"]
    if own_model is not None and own_model != name:
        raise UsageError(f"The learner's model is {name}, and this actor's --model {own_model}.")
    if ":" in name and own_model is None:
        raise UsageError(
            f"The learner's model is {name}, code that this actor was not started with; give it "
            f"--model {name} if that is what you want to run."
        )
    flags = SimpleNamespace(**{**welcome.model, "model": name})
    model = prepare_to_act(build_model(flags, welcome.spec))
    _check_alike(model, welcome)
    num_params = build_distribution(flags, welcome.spec).num_params
    if num_params != welcome.num_params:
        raise UsageError(
            f"The learner's policy has {welcome.num_params} parameters, this actor's {num_params}; "
            "use the same version of the code at both ends."
        )
    return model


def _check_alike(model: nn.Module, welcome: Welcome) -> None:
    """Both ends may be of different age, or mean different classes by the same name."""
    names = [name for name, _ in [*model.named_parameters(), *model.named_buffers()]]
    ours = [(name, tuple(t.shape)) for name, t in zip(names, tensors_of(model), strict=True)]
    theirs = [(name, shape) for name, _, shape in welcome.tensors]
    if ours != theirs:
        ours_only = [t for t in ours if t not in theirs] or ours
        theirs_only = [t for t in theirs if t not in ours] or theirs
        raise UsageError(
            f"The learner's model has other tensors than this actor's: {theirs_only[0]} there, "
            f"{ours_only[0]} here; use the same version of the code at both ends."
        )
    state = model.initial_state(batch_size=1)  # type: ignore[operator]
    shapes = [(part.shape[0], *part.shape[2:]) for part in state]
    if shapes != [part.shape for part in welcome.state]:
        raise UsageError(
            f"The learner's model has a memory of {[list(p.shape) for p in welcome.state]}, this "
            f"actor's of {[list(shape) for shape in shapes]}; use the same code at both ends."
        )


@torch.no_grad()
def load_weights(model: nn.Module, welcome: Welcome, data: bytes) -> None:
    """Copy a version of the weights, as it was sent, to the model."""
    start = 0
    for ours, (_, dtype, shape) in zip(tensors_of(model), welcome.tensors, strict=True):
        end = start + size_of(dtype, shape)
        ours.copy_(_tensor(data[start:end], dtype).view(shape))
        start = end


def _tensor(data: bytes, dtype: str) -> Tensor:
    if dtype == "bfloat16":
        bits = np.frombuffer(data, "<u2").astype(np.int16)
        return torch.from_numpy(bits).view(torch.bfloat16)
    numbers = np.frombuffer(data, np.dtype(dtype).newbyteorder("<"))
    return torch.from_numpy(numbers.astype(dtype))  # a copy: the bytes cannot be written to
