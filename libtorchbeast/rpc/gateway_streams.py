"""What a gateway does with a stream that has introduced itself: rows go to a lane, actions back."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc.aio

import nest
from libtorchbeast.rows import Spec
from libtorchbeast.rpc.clients import client_of
from libtorchbeast.rpc.grpc_streams import (
    INTRODUCE,
    READ_GREETING,
    STEP,
    Exchange,
    Read,
    Watched,
)
from libtorchbeast.rpc.handshake import Hello
from libtorchbeast.rpc.learner_line import LearnerLine
from libtorchbeast.rpc.limits import Limits
from libtorchbeast.rpc.steps import StepReader, encode_actions
from libtorchbeast.shared_lanes import AGENT, ENVIRONMENT, Lane, LaneClosed


@contextlib.asynccontextmanager
async def lane_for(line: LearnerLine, stream: Watched, hello: Hello) -> AsyncIterator[Lane]:
    """The lane of a stream that has introduced itself, while it is carried."""
    stream.has_done(INTRODUCE)
    with line.clients.playing(stream, hello):
        lane = await line.lanes.acquire(hello, client_of(stream))
        lane.name = f"{hello.name} at {stream.peer}"
        try:
            yield lane
        except LaneClosed as error:
            raise line.ending() from error
        finally:
            line.lanes.release(lane)


class Carrier:
    """Carries rows and actions between streams and lanes."""

    def __init__(self, line: LearnerLine, limits: Limits) -> None:
        self._line = line
        self._limits = limits

    async def play(
        self,
        stream: Watched,
        hello: Hello,
        read: Read,
        exchange: Exchange,
        accept: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Until the environments leave.

        `accept` is called once there is a lane. `exchange` writes actions and reads the next step,
        which it expects in time.
        """
        async with lane_for(self._line, stream, hello) as lane:
            with self._line.playing(hello, stream):
                if accept is not None:
                    stream.expect(READ_GREETING, self._limits.write_s)
                    await accept()
                    stream.has_done(READ_GREETING)
                await self._carry(stream, lane, read, exchange)

    async def _carry(self, stream: Watched, lane: Lane, read: Read, exchange: Exchange) -> None:
        assert isinstance(lane.spec, Spec)
        reader = StepReader(lane.spec, lane.num_envs, lane.rows)
        actions = nest.flatten(lane.actions)
        last_actions = nest.flatten(lane.rows["last_action"])
        for last in last_actions:
            last[...] = 0
        stream.expect(STEP, self._limits.step_s)
        data = await read()
        while data is not grpc.aio.EOF:
            stream.has_done(STEP)
            reader.read(data)
            if reader.info:
                lane.add_info(reader.info)
            lane.send_rows()
            if await self._line.lanes.wait_while(lane, AGENT) != ENVIRONMENT:
                raise self._line.ending()
            for last, action in zip(last_actions, actions, strict=True):
                last[...] = action
            stream.num_steps += 1
            data = await exchange(encode_actions(lane.actions))
