"""Messages that are written and answered in one operation: what comes back, and how calls end."""

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from libtorchbeast.rpc import grpc_loops
from libtorchbeast.rpc.grpc_streams import exchange

TIMEOUT_S = 20.0


async def answer(requests: Any, context: Any) -> None:
    """Echo each message, until one asks for another end."""
    while (data := await context.read()) not in (grpc.aio.EOF, b"end"):
        if data == b"abort":
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone for tea")
        if data != b"wait":
            await context.write(b"echo " + data)
    await context.write(b"the last one")


def over_a_call(use: Any) -> Any:
    """What `use(call)` returns, of a call that has been answered before."""

    async def main() -> Any:
        server = grpc.aio.server()
        handler = grpc.stream_stream_rpc_method_handler(answer)
        methods = grpc.method_handlers_generic_handler("Test", {"Play": handler})
        server.add_generic_rpc_handlers((methods,))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        try:
            async with asyncio.timeout(TIMEOUT_S):
                call = channel.stream_stream("/Test/Play")()
                await call.write(b"hello")
                assert await call.read() == b"echo hello"
                return await use(call)
        finally:
            await channel.close()
            await server.stop(None)

    return grpc_loops.run(main())


def test_each_message_is_answered():
    async def use(call):
        return [await exchange(call, b"%d" % i) for i in range(100)]

    assert over_a_call(use) == [b"echo %d" % i for i in range(100)]


def test_the_end_comes_after_the_last_message():
    async def use(call):
        return [await exchange(call, b"end"), await exchange(call, b"more")]

    assert over_a_call(use) == [b"the last one", grpc.aio.EOF]


def test_who_ends_a_call_is_heard():
    async def use(call):
        for _ in range(2):  # also by who comes back later
            with pytest.raises(grpc.aio.AioRpcError, match="gone for tea"):
                await exchange(call, b"abort")

    over_a_call(use)


def test_a_call_that_is_cancelled_ends_who_waits_for_it():
    async def use(call):
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await exchange(call, b"more")

    over_a_call(use)


def test_a_call_ends_with_who_waits_for_it():
    async def use(call):
        waiting = asyncio.create_task(exchange(call, b"wait"))
        await asyncio.sleep(0)  # until it has written
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return call.cancelled()

    assert over_a_call(use)
