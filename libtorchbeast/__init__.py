"""The data plane: moves nests of tensors between threads, in batches, outside the interpreter lock.

It contains no machine learning. The queues are C++ (cpp/); docs/cpp_core.md describes them.

Exported names are imported on first use, so processes that need only the pure Python parts (rows,
groups, seeding, tree) load neither compiled code nor gRPC.
"""

import importlib
from typing import TYPE_CHECKING, Any

import libtorchbeast.grpc_forks  # noqa: F401  (registers hooks for forks)

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
}  # all other names are in the compiled module

if not TYPE_CHECKING:  # with a module's __getattr__, mypy would accept any name

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = importlib.import_module(_MODULES.get(name, "libtorchbeast._C"))
        value = globals()[name] = getattr(module, name)  # later accesses find it there
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
