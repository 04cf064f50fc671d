"""Both ends of a stream in an event loop: a message goes out, and its answer comes in."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

STATUS_S = 1.0  # for a call that is over to say why

Read = Callable[[], Awaitable[Any]]
Write = Callable[[bytes], Awaitable[None]]


async def exchange(read: Read, write: Write, data: bytes) -> Any:
    """Send a message and wait for the answer.

    The answer may come before grpc says that all was sent, so both are waited for at once. The task
    starts when `write` waits: nothing stands before the message.
    """
    reading = asyncio.ensure_future(read())
    try:
        try:
            await write(data)
        except Exception:  # the call is over: reading tells how it ended
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STATUS_S):
                    await reading
            raise
        return await reading
    except BaseException:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        raise
