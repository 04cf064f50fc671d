"""Protects forked children of a program that uses gRPC, in which gRPC would hang or crash.

`import libtorchbeast` registers the hooks for forks. It does not import gRPC.
"""

import contextlib
import gc
import glob
import os
import sys

GRPC_THREADS = ("grpc_global_tim", "event_engine")  # the kernel keeps 15 characters of a name


class GrpcForks:
    """Whether this process was forked from one that had threads of gRPC, which a fork lacks.

    A `Server` in such a process can still listen at a unix socket, where it needs no gRPC.
    """

    had_threads = False  # whether gRPC's threads ran when this process was last about to fork
    is_child_of_grpc = False

    @classmethod
    def look_for_threads(cls) -> None:
        cls.had_threads = "grpc" in sys.modules and _has_grpc_threads()

    @classmethod
    def keep_what_grpc_made(cls) -> None:
        """In a new child, exempt the parent's gRPC objects from collection, which would crash."""
        if "grpc" in sys.modules:
            gc.freeze()
        cls.is_child_of_grpc = cls.is_child_of_grpc or cls.had_threads

    @classmethod
    def check(cls, address: str) -> None:
        """Raise RuntimeError if gRPC must not be used in this process: it might hang."""
        if not cls.is_child_of_grpc:
            return
        rule = "gRPC cannot be used in a process that was forked from one that uses it"
        remedy = "fork before gRPC is used, or use multiprocessing's 'spawn'"
        if address.startswith("unix:"):
            raise RuntimeError(
                f"{rule}, so that only lanes work at {address}; dial it with a learner of this "
                f"machine, {remedy}."
            )
        raise RuntimeError(
            f"{rule}, which is needed to listen at {address}; listen at a unix: address, {remedy}."
        )


def _has_grpc_threads() -> bool:
    """Whether gRPC has threads, as it does while it is in use. False on systems without /proc."""
    for path in glob.glob("/proc/self/task/*/comm"):
        with contextlib.suppress(OSError), open(path) as file:  # the thread may have ended
            if file.read().strip() in GRPC_THREADS:
                return True
    return False


os.register_at_fork(before=GrpcForks.look_for_threads, after_in_child=GrpcForks.keep_what_grpc_made)
