"""A gateway's lanes, which it requests from the learner and lends to one stream after the other.

An event loop cannot wait for a word in shared memory. So actors also write to a wakeup, one file
descriptor for all lanes of a gateway, whenever they pass a turn; the loop then checks all lanes
that a stream waits for. Lanes that are handed over to a host on this machine have no wakeup, and
are never reused: there is no way to know when the host has unmapped the memory.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable
from typing import Any

from libtorchbeast.rollout_layout import RolloutSpec
from libtorchbeast.rows import Spec
from libtorchbeast.rpc.handshake import (
    Hello,
    Refused,
    check_fit,
    learner_is_ending,
    no_descriptor_left,
)
from libtorchbeast.shared_lanes import CLOSED, GONE, Lane, LaneClosed, close_free_lane, map_lane

TICK_S = 0.2  # between two checks for lanes that were closed, which sends no wakeup
GRANT_S = 120.0  # until the learner must have granted a lane: it may be building its model
FREE_S = 60.0  # until the actor must have copied the last rollout from a lane


class LanePool:
    """Lends lanes of one spec to streams."""

    def __init__(self, wakeup_fd: int, ask: Callable[..., None]) -> None:
        """`ask(id=..., num_envs=..., ...)` asks the learner for a lane."""
        self._wakeup_fd = wakeup_fd
        self._ask = ask
        self._free: list[Lane] = []
        self._asked: dict[int, asyncio.Future[Lane]] = {}
        self._num_asked = 0
        self._waiting: dict[Lane, tuple[Any, asyncio.Future[Any]]] = {}
        self._spec: Spec | None = None  # of all lanes, known from the first one
        self._poller: asyncio.Task[None] | None = None
        self._retiring: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        os.set_blocking(self._wakeup_fd, False)
        asyncio.get_running_loop().add_reader(self._wakeup_fd, self._on_wakeup)
        self._poller = asyncio.create_task(self._look_now_and_then())

    def stop(self) -> None:
        asyncio.get_running_loop().remove_reader(self._wakeup_fd)
        for task in (self._poller, *self._retiring):
            if task is not None:
                task.cancel()

    async def acquire(self, hello: Hello, client: str) -> Lane:
        """Return a lane that is free for a client's stream; raise `Refused` if there is none."""
        check_fit(self._spec, hello.spec)
        lane = self._take_free(hello, client)
        if lane is None:
            lane = await self._new_lane(hello, client, hand_over=False)
            lane.release()  # the memory stays mapped, and descriptors are scarce
        try:
            async with asyncio.timeout(FREE_S):
                await self.wait_while(lane, GONE)
            lane.attach(0)
        except TimeoutError as error:
            self.release(lane)
            text = (
                "The learner has not yet taken the last rollout of a stream that ended; try again "
                "later."
            )
            raise Refused("UNAVAILABLE", text) from error
        except LaneClosed as error:
            raise learner_is_ending() from error
        except BaseException:
            self.release(lane)
            raise
        return lane

    def release(self, lane: Lane) -> None:
        """Take back the lane of a stream that has ended; the actor pads its open rollout."""
        lane.turn.abandon()
        self._free.append(lane)

    async def acquire_to_hand_over(self, hello: Hello, client: str) -> Lane:
        """Return a new lane, with its file descriptor open, for a host on this machine."""
        check_fit(self._spec, hello.spec)
        return await self._new_lane(hello, client, hand_over=True)

    def retire(self, lane: Lane) -> None:
        """Give up a lane that was handed over, as its host is gone or must leave."""
        lane.release()
        lane.turn.abandon()
        task = asyncio.create_task(self._close_when_free(lane))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    async def wait_while(self, lane: Lane, state: Any) -> Any:
        """Wait while a lane is in this state, and return the next one."""
        now = lane.turn.state
        if now != state:
            return now
        future = asyncio.get_running_loop().create_future()
        self._waiting[lane] = (state, future)
        try:
            return await future
        finally:
            del self._waiting[lane]

    def grant(
        self, id: int, fd: int | None, spec: Any, num_envs: int, rollout: RolloutSpec | None = None
    ) -> bool:
        """Accept the lane that the learner grants to request `id`; False if it cannot be mapped.

        With `rollout`, the lane is one for whole rollouts of this spec.
        """
        future = self._asked.get(id)
        self._spec = Spec.from_json(spec)
        lane = map_lane(fd, self._spec if rollout is None else rollout, num_envs)
        if lane is None:
            self.refuse(id, no_descriptor_left())
            return False
        if future is not None and not future.done():
            future.set_result(lane)
        else:
            lane.close()  # the stream that requested it has left
        return True

    def refuse(self, id: int, refusal: Refused) -> None:
        """End the wait for a lane of request `id` with the learner's refusal."""
        future = self._asked.get(id)
        if future is not None and not future.done():
            future.set_exception(refusal)

    def _take_free(self, hello: Hello, client: str) -> Lane | None:
        """Take a fitting lane that is free now, or else one that will be free soon, if any."""
        self._free = [lane for lane in self._free if lane.turn.state != CLOSED]
        lanes = [lane for lane in self._free if lane.fits(hello.num_envs, client, hello.has_model)]
        if not lanes:
            return None
        lane = min(lanes, key=lambda lane: lane.turn.state == GONE)
        self._free.remove(lane)
        return lane

    async def _new_lane(self, hello: Hello, client: str, hand_over: bool) -> Lane:
        """Request a lane from the learner; close a free one, which does not fit, in exchange."""
        close_free_lane(self._free)
        self._num_asked += 1
        id = self._num_asked
        granted: asyncio.Future[Lane] = asyncio.get_running_loop().create_future()
        self._asked[id] = granted
        self._ask(
            id=id,
            num_envs=hello.num_envs,
            spec=hello.spec.to_json(),
            hand_over=hand_over,
            client=client,
            has_model=hello.has_model,
            knows_marks=hello.knows_marks,
        )
        try:
            async with asyncio.timeout(GRANT_S):
                lane = await granted
            lane.client = client
            return lane
        except (TimeoutError, asyncio.CancelledError) as error:
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                granted.result().close()  # it was granted just as this wait ended
            if isinstance(error, TimeoutError):
                text = "The learner is not ready yet; try again."
                raise Refused("UNAVAILABLE", text) from error
            raise
        finally:
            del self._asked[id]

    async def _close_when_free(self, lane: Lane) -> None:
        """Close a lane once the actor has padded the rollout that its host left open."""
        await self.wait_while(lane, GONE)
        lane.turn.close()

    def _on_wakeup(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wakeup_fd, 1 << 16)
        self._look()

    def _look(self) -> None:
        """Wake those that wait for a lane whose state has changed."""
        for lane, (state, future) in self._waiting.items():
            now = lane.turn.state
            if now != state and not future.done():
                future.set_result(now)

    async def _look_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._look()
