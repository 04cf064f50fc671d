"""Forks of a program that uses gRPC: what the child must leave alone.

`import libtorchbeast` is enough for its forks to be known; gRPC is not imported here.
"""

import contextlib
import gc
import glob
import os
import sys

GRPC_THREADS = ("grpc_global_tim", "event_engine")  # names, as far as the kernel keeps them


class GrpcForks:
    """What a forked process must know of its parent's gRPC, whose threads it does not have.

    A `Server` that is forked from a program with gRPC threads does without gRPC at a unix socket.
    """

    had_threads = False  # at the last fork of this process
    is_child_of_grpc = False

    @classmethod
    def look_for_threads(cls) -> None:
        cls.had_threads = "grpc" in sys.modules and _has_grpc_threads()

    @classmethod
    def keep_what_grpc_made(cls) -> None:
        """Objects of the parent's gRPC must not be collected: it would crash."""
        if "grpc" in sys.modules:
            gc.freeze()
        cls.is_child_of_grpc = cls.is_child_of_grpc or cls.had_threads

    @classmethod
    def check(cls, address: str) -> None:
        """RuntimeError if gRPC cannot be used here: it would hang, now and then."""
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
    """They are there while gRPC is in use. (Only Linux says.)"""
    for path in glob.glob("/proc/self/task/*/comm"):
        with contextlib.suppress(OSError), open(path) as file:  # it may have ended
            if file.read().strip() in GRPC_THREADS:
                return True
    return False


os.register_at_fork(before=GrpcForks.look_for_threads, after_in_child=GrpcForks.keep_what_grpc_made)
