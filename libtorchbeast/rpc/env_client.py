"""Environments that dial a learner, on this machine or another.

If they lose the learner, the environments keep their episodes and dial again. A learner on this
machine (`unix:/path`) hands over lanes; if it cannot, and on other machines, gRPC is used.
"""

import asyncio
import contextlib
import gc
import logging
import traceback
from collections.abc import Callable
from typing import Any

from libtorchbeast.env_host import BadAnswer, play
from libtorchbeast.groups import Broken, Group
from libtorchbeast.lane_scheduler import LaneScheduler, pause
from libtorchbeast.log_repeats import RepeatFilter
from libtorchbeast.rpc import grpc_loops
from libtorchbeast.rpc.address import Address
from libtorchbeast.rpc.dialing import (
    NO_LINK,
    LanesImpossible,
    Redial,
    dial_lane,
    dial_stream,
    finish_writing,
    kept_connections,
    token_now,
    why_closed,
)
from libtorchbeast.rpc.handshake import MAX_TEXT, Hello, invalid
from libtorchbeast.rpc.security import Security
from libtorchbeast.shared_lanes import LaneClosed

logger = logging.getLogger("torchbeast")


class EnvironmentClient:
    """Steps groups of environments with the actions of a learner, until it is stopped."""

    def __init__(
        self,
        make_groups: list[Callable[[], Group]],
        address: str,
        name: str = "environments",
        security: Security | None = None,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        """`tick` is called at every step, and a few times a second."""
        self._security = security or Security()
        self._security.check_dialing(address)
        self._make_groups = make_groups
        self._address = address
        self._name = name
        self._tick = tick
        self._is_stopped = False
        self._stop: Callable[[], object] = lambda: None
        self._repeats = RepeatFilter()

    def _redial(self) -> "Redial":
        return Redial(self._address, "these environments", self._repeats)

    def run(self) -> None:
        """Play until `stop()`. Raise what the environments raise, after sending it to the learner.

        If a learner refuses these environments, dial it again, with long pauses.
        """
        groups = [make() for make in self._make_groups]
        try:
            if Address.parse(self._address).path:
                with contextlib.suppress(LanesImpossible):
                    self._run_on_lanes(groups)
                    return
                logger.info("%s hands over no lanes; speaking gRPC.", self._address)
            grpc_loops.run(self._run_streams(groups))
            gc.collect()  # reference cycles of cancelled tasks may hold connections
        finally:
            for group in groups:
                group.close()

    def stop(self) -> None:
        """Make `run()` return; any thread may call this."""
        self._is_stopped = True
        self._stop()

    def _hello(self, group: Group) -> Hello:
        token = token_now(self._security)
        return Hello(self._name, group.num_envs, group.spec, token)

    # Lanes.

    def _run_on_lanes(self, groups: list[Group]) -> None:
        scheduler = LaneScheduler(self._tick)
        self._stop = scheduler.stop
        if self._is_stopped:
            return
        for group in groups:
            scheduler.add(self._play_on_lanes(group))
        scheduler.run()

    async def _play_on_lanes(self, group: Group) -> None:
        """Play with a group on one lane after the other."""
        redial = self._redial()
        while True:
            connection = None
            try:
                connection, link, greeting = await dial_lane(self._address, self._hello(group))
                redial.succeeded()
                await play(group, link, self._tick, greeting.knows_truncation)
            except NO_LINK as error:
                if connection is not None and isinstance(error, BadAnswer):
                    connection.try_send("refused", **invalid(str(error)).to_json())
                await pause(redial.pause_after(error))
            except LaneClosed:
                gone = await why_closed(link, connection)
                await pause(redial.pause_after(gone))
            except Broken:
                if connection is not None:
                    connection.try_send("failure", text=traceback.format_exc()[-MAX_TEXT:])
                raise
            finally:
                if connection is not None:
                    connection.close()

    # Streams.

    async def _run_streams(self, groups: list[Group]) -> None:
        from libtorchbeast.rpc.grpc_streams import Watched, watch

        streams: set[Watched] = set()
        stopped, self._stop = grpc_loops.stop_event()
        if self._is_stopped:
            return
        players = (self._play_streams(group, streams) for group in groups)
        await grpc_loops.first_of(stopped.wait(), watch(streams, self._tick), *players)

    async def _play_streams(self, group: Group, streams: set[Any]) -> None:
        """Play with a group on one stream after the other."""
        redial = self._redial()
        async with kept_connections() as kept:
            while True:
                try:
                    hello = self._hello(group)
                    dialled = dial_stream(self._address, self._security, hello, streams, kept)
                    async with dialled as (call, link, greeting):
                        redial.succeeded()
                        await self._play(group, call, link, greeting.knows_truncation)
                except NO_LINK as error:
                    await asyncio.sleep(redial.pause_after(error))

    async def _play(self, group: Group, call: Any, link: Any, knows_truncation: bool) -> None:
        """Play on one stream until it ends; if this end ends it, send the learner the reason."""
        from libtorchbeast.rpc.messages import encode_failure

        try:
            await play(group, link, self._tick, knows_truncation)
        except (Broken, BadAnswer) as error:
            text = traceback.format_exc() if isinstance(error, Broken) else str(error)
            await finish_writing(call, encode_failure(text))
            raise
