"""Event loops for grpc.aio, which are kept and reused instead of closed.

grpc.aio hands events to all loops that it has ever seen. If one of them is closed, it loses events
of the others. Several loops may run at once, each in a thread of its own.
"""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any

# gRPC's own fork handlers crash one fork in four while its event loops run. Without them, a forked
# child works as long as it does not use gRPC, which a `Server` at a unix socket does not.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

_lock = threading.Lock()
_idle: list[asyncio.AbstractEventLoop] = []


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """Like `asyncio.run`, but in a loop that is kept and reused."""
    with _lock:
        loop = _idle.pop() if _idle else asyncio.new_event_loop()
    try:
        asyncio.set_event_loop(loop)
        try:
            return loop.run_until_complete(main)
        finally:
            _cancel_tasks(loop)
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(_pass_on())
            asyncio.set_event_loop(None)
    finally:
        with _lock:
            _idle.append(loop)


def stop_event() -> tuple[asyncio.Event, Callable[[], object]]:
    """Return an event of the running loop, and a function that sets it from any thread."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    return stopped, lambda: loop.call_soon_threadsafe(stopped.set)


async def first_of(*coroutines: Coroutine[Any, Any, object]) -> None:
    """Run coroutines until one of them ends, and cancel the others; raise what it raises."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _cancel_tasks(loop: asyncio.AbstractEventLoop) -> None:
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))


async def _pass_on() -> None:
    """Run the callbacks that are still scheduled, as they hold references to ended tasks."""
    for _ in range(3):
        await asyncio.sleep(0)


def _forget() -> None:
    """Drop the kept loops in a forked child, which has none of gRPC's threads behind them."""
    global _lock
    _lock = threading.Lock()
    _idle.clear()


os.register_at_fork(after_in_child=_forget)
