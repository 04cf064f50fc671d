"""What a gateway does with actors that carry the model: rollouts go to a lane, weights back.

Three tasks for each stream: one reads what comes, one puts rollouts into the lane and says when the
learner has taken them, one sends weights to who asked for them. A rollout is read ahead while the
one before waits for the learner, so that a request for weights behind it does not wait, too.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import grpc.aio

from libtorchbeast.rollouts import RolloutSpec
from libtorchbeast.rpc.actor_messages import (
    decode_request,
    encode_taken,
    encode_weights,
    encode_welcome,
    is_rollout,
)
from libtorchbeast.rpc.gateway_streams import lane_for
from libtorchbeast.rpc.grpc_loops import first_of
from libtorchbeast.rpc.grpc_streams import READ_GREETING, READ_WEIGHTS, Read, Watched
from libtorchbeast.rpc.handshake import Greeting, Hello, invalid, no_descriptor_left
from libtorchbeast.rpc.learner_line import LearnerLine
from libtorchbeast.rpc.limits import Limits
from libtorchbeast.rpc.rollout_messages import RolloutReader
from libtorchbeast.rpc.weights import Publication
from libtorchbeast.shared_lanes import AGENT, ENVIRONMENT, Lane

ROLLOUT = "sent a rollout"

Write = Callable[[bytes], Awaitable[Any]]


class ActorCarrier:
    """Carries rollouts and weights between streams and the learner."""

    def __init__(self, line: LearnerLine, limits: Limits) -> None:
        self._line = line
        self._limits = limits

    async def play(
        self,
        stream: Watched,
        hello: Hello,
        weights_dtype: str,
        greeting: Greeting,
        read: Read,
        write: Write,
    ) -> None:
        """Until the actor leaves."""
        async with lane_for(self._line, stream, hello) as lane:
            publication = self._line.publication
            if publication is None:  # its descriptor was lost
                raise no_descriptor_left()
            with self._line.playing(hello, stream):
                stream.expect(READ_GREETING, self._limits.write_s)
                await write(encode_welcome(publication.offer, greeting, weights_dtype))
                stream.has_done(READ_GREETING)
                carrying = _Carrying(
                    self._line, self._limits, stream, lane, publication, read, write
                )
                await first_of(
                    carrying.read_messages(),
                    carrying.carry_rollouts(),
                    carrying.send_weights(weights_dtype),
                )


class _Carrying:
    """One stream."""

    def __init__(
        self,
        line: LearnerLine,
        limits: Limits,
        stream: Watched,
        lane: Lane,
        publication: Publication,
        read: Read,
        write: Write,
    ) -> None:
        self._line = line
        self._limits = limits
        self._stream = stream
        self._lane = lane
        self._publication = publication
        self._read = read
        self._write = write
        self._writing = asyncio.Lock()
        self._rollouts: asyncio.Queue[bytes] = asyncio.Queue(maxsize=1)
        self._requests: asyncio.Queue[int] = asyncio.Queue(maxsize=1)
        self._is_asked = False
        self._num_here = 0  # rollouts that were read and not taken
        # The last two versions that were sent: with one of them the actor plays.
        self._sent: deque[int] = deque(maxlen=2)

    async def read_messages(self) -> None:
        self._expect_rollout()
        while True:
            data = await self._read()
            if data is grpc.aio.EOF:
                return
            if not is_rollout(data):
                have = decode_request(data)
                if self._is_asked:
                    raise invalid("One request for weights at a time, got another one.")
                self._is_asked = True
                self._requests.put_nowait(have)
                if self._may_be_late():
                    self._expect_rollout()
                continue
            self._num_here += 1
            self._stream.has_done(ROLLOUT)
            await self._rollouts.put(data)
            del data

    async def carry_rollouts(self) -> None:
        lane, lanes = self._lane, self._line.lanes
        assert isinstance(lane.spec, RolloutSpec)
        reader = RolloutReader(lane.spec, lane.num_envs, lane.rows)
        while True:
            reader.read(await self._rollouts.get(), self._publication.version)
            if reader.info:
                lane.add_info(reader.info)
            if reader.num_unsent:
                self._line.clients.count_unsent(self._stream, reader.num_unsent)
            lane.send_rows()
            if await lanes.wait_while(lane, AGENT) != ENVIRONMENT:
                raise self._line.ending()
            self._stream.num_steps += lane.spec.unroll_length
            await self._send(encode_taken(self._publication.version))
            self._num_here -= 1
            self._expect_rollout()

    def _expect_rollout(self) -> None:
        """In time from now on, unless one is here: then it is the learner that is waited for."""
        if self._num_here == 0:
            self._stream.expect(ROLLOUT, self._limits.rollout_s)

    def _may_be_late(self) -> bool:
        """Whether weights have become too old on their way, or while they were played with: an
        actor sends no rollout then, and tries again with newer ones."""
        most = self._publication.offer.max_policy_lag
        if most is None or not self._sent:
            return False
        return self._publication.version - self._sent[0] > most

    async def send_weights(self, dtype: str) -> None:
        publication = self._publication
        while True:
            version = await publication.after(await self._requests.get(), dtype)
            for start, data in version.pieces():
                if start + len(data) == len(version.data):
                    self._is_asked = False  # the next may come as soon as this one is read
                    self._sent.append(version.number)
                await self._send(encode_weights(version, start, data, publication.version))

    async def _send(self, data: bytes) -> None:
        async with self._writing:
            self._stream.expect(READ_WEIGHTS, self._limits.write_s)
            await self._write(data)
            self._stream.has_done(READ_WEIGHTS)
