"""The learner's weights in shared memory, for actors in other processes.

Written by one learner, read by any number of actors, without locks: a process that dies at any
instant blocks nobody. A reader never keeps a mixture of two versions; this counts on stores
becoming visible in their order, as they do on x86.
"""

import time

import torch
from torch import Tensor, nn


class SharedWeights:
    """A copy of a model's state in shared memory, and the version (number of updates) it is of.

    `_begun` is raised before a copy and `_done` after it: equal numbers that do not move while a
    reader copies mean that it read one whole version.
    """

    def __init__(self, model: nn.Module) -> None:
        state = model.state_dict()
        sizes = [_aligned(t.numel() * t.element_size()) for t in state.values()]
        self._bytes = torch.zeros(sum(sizes), dtype=torch.uint8).share_memory_()
        self._tensors: dict[str, Tensor] = {}
        for (name, tensor), piece in zip(state.items(), self._bytes.split(sizes), strict=True):
            used = piece[: tensor.numel() * tensor.element_size()]
            # Plain row-major order in here, whatever memory format the model uses.
            self._tensors[name] = used.view(tensor.dtype).view(tensor.shape)
        self._begun = torch.full((1,), -1, dtype=torch.int64).share_memory_()
        self._done = torch.full((1,), -1, dtype=torch.int64).share_memory_()

    def publish(self, model: nn.Module, version: int) -> None:
        """Make `model`'s weights the newest."""
        self._begun.fill_(version)
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                self._tensors[name].copy_(tensor)
        self._done.fill_(version)

    def version(self) -> int:
        """The newest whole version; -1 before the first."""
        return int(self._done.item())

    def fetch(self, model: nn.Module, have: int = -1, timeout_s: float = 60.0) -> int:
        """Copy the newest weights to `model` unless it has them; returns their version."""
        deadline = time.monotonic() + timeout_s
        state = model.state_dict()
        while True:
            version = self.version()
            if version == have and int(self._begun.item()) == have:
                return version
            if int(self._begun.item()) == version:
                with torch.no_grad():
                    for name, tensor in state.items():
                        tensor.copy_(self._tensors[name])
                if int(self._begun.item()) == version:
                    return version
            if time.monotonic() > deadline:
                raise TimeoutError(f"No whole version of the weights within {timeout_s:.0f} s.")
            time.sleep(0.0005)  # the learner is in the middle of its copy


def _aligned(num_bytes: int) -> int:
    return (num_bytes + 63) // 64 * 64
