"""IMPALA in PyTorch: `monobeast` on one machine in pure Python, `polybeast` with a C++ core.

torchbeast.train(env=..., model=..., **flags)   train
torchbeast.evaluate(xpid)                       play episodes and report their returns
torchbeast.Agent.load(RUN).act(observation)     use a trained agent anywhere
torchbeast.connect(address)                     connect a simulator that calls the agent
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from libtorchbeast.rpc.simulator import Actor
    from torchbeast.api import TrainedRun, evaluate, train
    from torchbeast.errors import UsageError
    from torchbeast.run.saved_agent import Agent

__all__ = ["Agent", "TrainedRun", "UsageError", "connect", "evaluate", "train"]

# Imported lazily, so that processes that only step environments never import torch.
_PLACES = {
    "Agent": "torchbeast.run.saved_agent",
    "TrainedRun": "torchbeast.api",
    "UsageError": "torchbeast.errors",
    "evaluate": "torchbeast.api",
    "train": "torchbeast.api",
}


def connect(address: str, **options: Any) -> "Actor":
    """Connect a simulator that calls the agent; see `libtorchbeast.rpc.simulator.Actor`."""
    from libtorchbeast.rpc.simulator import Actor  # imported here: MonoBeast needs no grpcio

    return Actor(address, **options)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'torchbeast' has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
