"""Tests. Those that fork do so in a process that may have used gRPC: see rpc/grpc_loops.py."""

import os

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # before anything imports grpc
