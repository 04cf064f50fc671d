"""What a gateway does with a stream that has introduced itself: rows go to a lane, actions back."""

import grpc.aio

import nest
from libtorchbeast.rpc.clients import client_of
from libtorchbeast.rpc.grpc_streams import (
    INTRODUCE,
    READ,
    READ_GREETING,
    STEP,
    Read,
    Watched,
    Write,
)
from libtorchbeast.rpc.handshake import Hello
from libtorchbeast.rpc.learner_line import LearnerLine
from libtorchbeast.rpc.limits import Limits
from libtorchbeast.rpc.steps import StepReader, encode_actions
from libtorchbeast.shared_lanes import AGENT, ENVIRONMENT, Lane, LaneClosed


class Carrier:
    """Carries rows and actions between streams and lanes."""

    def __init__(self, line: LearnerLine, limits: Limits) -> None:
        self._line = line
        self._limits = limits

    async def play(self, stream: Watched, hello: Hello, read: Read, write: Write,
                   accept: bytes | None = None) -> None:  # fmt: skip
        """Until the environments leave; `accept` is written once there is a lane."""
        stream.has_done(INTRODUCE)
        with self._line.clients.playing(stream, hello):
            lane = await self._line.lanes.acquire(hello, client_of(stream))
            lane.name = f"{hello.name} at {stream.peer}"
            try:
                with self._line.playing(hello, stream):
                    if accept is not None:
                        stream.expect(READ_GREETING, self._limits.write_s)
                        await write(accept)
                        stream.has_done(READ_GREETING)
                    await self._carry(stream, lane, read, write)
            except LaneClosed as error:
                raise self._line.ending() from error
            finally:
                self._line.lanes.release(lane)

    async def _carry(self, stream: Watched, lane: Lane, read: Read, write: Write) -> None:
        reader = StepReader(lane.spec, lane.num_envs, lane.rows)
        actions = nest.flatten(lane.actions)
        last_actions = nest.flatten(lane.rows["last_action"])
        for last in last_actions:
            last[...] = 0
        while True:
            stream.expect(STEP, self._limits.step_s)
            data = await read()
            stream.has_done(STEP)
            if data is grpc.aio.EOF:
                return
            reader.read(data)
            if reader.info:
                lane.add_info(reader.info)
            lane.send_rows()
            if await self._line.lanes.wait_while(lane, AGENT) != ENVIRONMENT:
                raise self._line.ending()
            for last, action in zip(last_actions, actions, strict=True):
                last[...] = action
            stream.num_steps += 1
            stream.expect(READ, self._limits.write_s)
            await write(encode_actions(lane.actions))
            stream.has_done(READ)
