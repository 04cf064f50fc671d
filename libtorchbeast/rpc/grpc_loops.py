"""Event loops for grpc.aio, which never forgets one: used again instead of closed.

Several may run at once, each in a thread of its own. grpc hands events to all loops it has ever
seen, and one that is closed makes it lose those of the others.
"""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any

# gRPC's own handlers crash one fork in four while its event loops are at work. Without them a
# forked child is well as long as it leaves gRPC alone, as a `Server` at a unix socket does.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

_lock = threading.Lock()
_idle: list[asyncio.AbstractEventLoop] = []


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """`asyncio.run`, in a loop that is kept."""
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
    """An event of the loop that runs, and what sets it from any thread."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    return stopped, lambda: loop.call_soon_threadsafe(stopped.set)


async def first_of(*coroutines: Coroutine[Any, Any, object]) -> None:
    """Until one of them ends, or raises; none is left."""
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
    """Let callbacks that wait for their turn have it: they hold what has ended."""
    for _ in range(3):
        await asyncio.sleep(0)


def _forget() -> None:
    """A fork has none of the threads behind these loops."""
    global _lock
    _lock = threading.Lock()
    _idle.clear()


os.register_at_fork(after_in_child=_forget)
