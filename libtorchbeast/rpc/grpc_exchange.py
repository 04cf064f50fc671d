"""Messages that are answered one by one, over calls of grpc.aio that this end has made.

Each operation of grpc.aio passes from the thread that reads sockets through another socket to the
event loop. What is written and what answers it are one operation here. `execute_batch` is no part
of what grpc documents: `tests/test_grpc_exchange.py` says whether a version of grpcio works.
"""

import asyncio
from typing import Any

from grpc._cython import cygrpc


async def exchange(call: Any, data: bytes) -> Any:
    """Write a message and read the next one, after others were; grpc.aio.EOF, or `AioRpcError`."""
    received = cygrpc.ReceiveMessageOperation(0)
    operations = (cygrpc.SendMessageOperation(data, 0), received)
    try:
        await cygrpc.execute_batch(call._cython_call, operations, asyncio.get_running_loop())
        message = received.message()
    except cygrpc.ExecuteBatchError:
        message = None
    except asyncio.CancelledError:  # as grpc's own reading does, or the connection would stay open
        call.cancel()
        raise
    return await call.read() if message is None else message  # reading says how a call has ended
