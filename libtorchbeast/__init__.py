"""The data plane: moves nests of tensors between threads, in batches, outside the interpreter lock.

Knows no machine learning. The queues are C++ (cpp/); docs/cpp_core.md says how they work.

What is exported is imported when it is first used. Processes that need only the pure Python parts
(rows, groups, seeding, tree) load neither compiled code nor gRPC.
"""

import importlib
from typing import TYPE_CHECKING, Any

import libtorchbeast.grpc_forks  # noqa: F401  (forks of this program are to be known)

if TYPE_CHECKING:
    from libtorchbeast._C import (
        Array,
        AsyncError,
        Batch,
        BatchingQueue,
        ClosedBatchingQueue,
        DynamicBatcher,
        NestError,
    )
    from libtorchbeast.actor_pool import ActorPool
    from libtorchbeast.rpc.env_server import Server
    from libtorchbeast.rpc.security import Security

__all__ = [
    "ActorPool",
    "Array",
    "AsyncError",
    "Batch",
    "BatchingQueue",
    "ClosedBatchingQueue",
    "DynamicBatcher",
    "NestError",
    "Security",
    "Server",
]

_MODULES = {
    "ActorPool": "libtorchbeast.actor_pool",
    "Security": "libtorchbeast.rpc.security",
    "Server": "libtorchbeast.rpc.env_server",
}  # all others are compiled

if not TYPE_CHECKING:  # or mypy would take any name for one of ours

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = importlib.import_module(_MODULES.get(name, "libtorchbeast._C"))
        value = globals()[name] = getattr(module, name)  # found here the next time
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
