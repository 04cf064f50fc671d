"""PolyBeast's model for inference: always one whole version, replaced without any waiting."""

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from torchbeast.core.precision import computes_bf16, wants_bf16


class ActorModel:
    """Copies of a model on the agent's device: the newest, and older ones still in use.

    Inference threads use the newest copy, which is never written to; the learner writes to a copy
    that is not in use.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        version: int = 0,
        compile: bool = False,
        num_users: int = 1,
        on_publish: Callable[[nn.Module, int], None] = lambda model, version: None,
        autocast: str = "none",
    ) -> None:
        """`num_users` threads may use it at a time; `on_publish` is called after each `publish`.

        If the learner uses bfloat16 by `autocast` (see `core/precision.py`), and this device has
        instructions for it, copies keep the weights of image nets in bfloat16: to convert them
        would take a third of a small batch's time.
        """
        self._device = device
        learners = next((tensor.device for tensor in tensors_of(model)), device)
        self._is_bf16 = wants_bf16(learners, autocast) and computes_bf16(device.type)
        self._on_publish = on_publish
        self._compile = compile
        self._lock = threading.Lock()  # guards the following
        # All copies are made here, before other threads use the device.
        self._newest, *self._spare = [
            self._copy(model, version) for _ in range(num_copies(num_users))
        ]

    def publish(self, model: nn.Module, version: int) -> None:
        """Make these weights the newest. Only one thread at a time may call it."""
        with self._lock:
            fresh = self._spare.pop() if self._spare else None
        if fresh is None:
            fresh = self._copy(model, version)
        with torch.no_grad():
            for ours, theirs in zip(tensors_of(fresh.model), tensors_of(model), strict=True):
                ours.copy_(theirs)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # inference has its own stream
        fresh.version = version
        with self._lock:
            old, self._newest = self._newest, fresh
            if old.num_users == 0:
                self._spare.append(old)
        self._on_publish(model, version)

    @contextmanager
    def newest(self) -> Iterator[tuple[nn.Module, int]]:
        """The newest weights and their version, unchanged while they are in use."""
        with self._lock:
            used = self._newest
            used.num_users += 1
        try:
            yield used.model, used.version
        finally:
            with self._lock:
                used.num_users -= 1
                if used.num_users == 0 and used is not self._newest:
                    self._spare.append(used)

    def _copy(self, model: nn.Module, version: int) -> "_Copy":
        fresh = prepare_to_act(copy.deepcopy(model)).to(self._device)
        for module in fresh.modules() if self._is_bf16 else ():
            if callable(keep_images_in := getattr(module, "keep_images_in", None)):
                keep_images_in(torch.bfloat16)
        if self._compile:
            fresh.compile(dynamic=True)  # batches of all sizes
        return _Copy(fresh, version)


def num_copies(num_users: int) -> int:
    """Copies that are needed: the newest, one to write to, and at worst an old one per user."""
    return num_users + 2


def prepare_to_act(model: nn.Module) -> nn.Module:
    """Put dropout, batch normalisation and the like into evaluation mode; returns the model.

    This holds for PyTorch's own layers and classes derived from them. Other modules stay as they
    are, since an agent's own `training` is what makes it sample actions.
    """
    for module in model.modules():
        if any(_is_layer(kind) for kind in type(module).__mro__):
            module.training = False
    return model


def _is_layer(kind: type) -> bool:
    """Whether a class is one of PyTorch's layers, and not only a base class or container."""
    return kind.__module__.startswith("torch.nn.") and kind not in _CONTAINERS


_CONTAINERS = (nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict)


def tensors_of(model: nn.Module) -> Iterator[torch.Tensor]:
    """All tensors that a model's output depends on, also buffers that are in no checkpoint."""
    yield from model.parameters()
    yield from model.buffers()


class _Copy:
    def __init__(self, model: nn.Module, version: int) -> None:
        self.model = model
        self.version = version
        self.num_users = 0
