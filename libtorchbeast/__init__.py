"""The data plane: moves nests of tensors between threads, in batches, outside the interpreter lock.

Knows no machine learning. The queues are C++ (cpp/); docs/core.md says how they work.
"""

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
from libtorchbeast.rpc.security import Security
from libtorchbeast.rpc.server import Server

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
