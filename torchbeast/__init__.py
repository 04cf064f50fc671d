"""IMPALA in PyTorch: `monobeast` on one machine in pure Python, `polybeast` with a C++ core."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from libtorchbeast.rpc.simulator import Actor


def connect(address: str, **options: Any) -> "Actor":
    """Connect a simulator that calls the agent; see `libtorchbeast.rpc.simulator.Actor`."""
    from libtorchbeast.rpc.simulator import Actor  # MonoBeast does without

    return Actor(address, **options)
