"""Carries the data of a gateway's streams, once they have introduced themselves.

carry_steps     of environments: rows to a lane, and actions back
carry_rollouts  of actors that carry the model: whole rollouts to a lane, and weights back
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

import nest
from libtorchbeast.rollout_layout import RolloutSpec
from libtorchbeast.rows import Spec
from libtorchbeast.rpc.actor_messages import (
    decode_request,
    encode_taken,
    encode_weights,
    encode_welcome,
)
from libtorchbeast.rpc.connected_clients import client_of
from libtorchbeast.rpc.grpc_loops import first_of
from libtorchbeast.rpc.grpc_streams import (
    INTRODUCE,
    READ_GREETING,
    READ_WEIGHTS,
    STEP,
    Exchange,
    Read,
    Watched,
)
from libtorchbeast.rpc.handshake import Greeting, Hello, invalid, no_descriptor_left
from libtorchbeast.rpc.learner_connection import LearnerConnection
from libtorchbeast.rpc.rollout_messages import RolloutReader, is_rollout
from libtorchbeast.rpc.step_messages import StepReader, encode_actions
from libtorchbeast.rpc.weights import Publication
from libtorchbeast.shared_lanes import AGENT, ENVIRONMENT, Lane, LaneClosed

ROLLOUT = "sent a rollout"

Write = Callable[[bytes], Awaitable[Any]]


@contextlib.asynccontextmanager
async def lane_for(
    learner: LearnerConnection, stream: Watched, hello: Hello
) -> AsyncIterator[Lane]:
    """Yield a lane for a stream that has introduced itself, and release it afterwards."""
    stream.has_done(INTRODUCE)
    with learner.clients.playing(stream, hello):
        lane = await learner.lanes.acquire(hello, client_of(stream))
        lane.name = f"{hello.name} at {stream.peer}"
        try:
            yield lane
        except LaneClosed as error:
            raise learner.ending() from error
        finally:
            learner.lanes.release(lane)


# ------------------------------------------------------------------------------------------- steps


async def carry_steps(
    learner: LearnerConnection,
    stream: Watched,
    hello: Hello,
    read: Read,
    exchange: Exchange,
    accept: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Carry rows to a lane, and actions back, until the environments leave.

    `accept` is called once there is a lane. `exchange` writes actions and reads the next Step, for
    which it sets the stream's deadline.
    """
    async with lane_for(learner, stream, hello) as lane:
        with learner.playing(hello, stream):
            if accept is not None:
                stream.expect(READ_GREETING, learner.limits.write_s)
                await accept()
                stream.has_done(READ_GREETING)
            await _carry(learner, stream, lane, read, exchange)


async def _carry(
    learner: LearnerConnection, stream: Watched, lane: Lane, read: Read, exchange: Exchange
) -> None:
    assert isinstance(lane.spec, Spec)
    reader = StepReader(lane.spec, lane.num_envs, lane.rows)
    actions = nest.flatten(lane.actions)
    last_actions = nest.flatten(lane.rows["last_action"])
    for last in last_actions:
        last[...] = 0
    stream.expect(STEP, learner.limits.step_s)
    data = await read()
    while data is not grpc.aio.EOF:
        stream.has_done(STEP)
        reader.read(data)
        if reader.info:
            lane.add_info(reader.info)
        lane.send_rows()
        if await learner.lanes.wait_while(lane, AGENT) != ENVIRONMENT:
            raise learner.ending()
        for last, action in zip(last_actions, actions, strict=True):
            last[...] = action
        stream.num_steps += 1
        data = await exchange(encode_actions(lane.actions))


# ---------------------------------------------------------------------------------------- rollouts


async def carry_rollouts(
    learner: LearnerConnection,
    stream: Watched,
    hello: Hello,
    weights_dtype: str,
    greeting: Greeting,
    read: Read,
    write: Write,
) -> None:
    """Carry rollouts to a lane, and weights back, until the actor leaves."""
    async with lane_for(learner, stream, hello) as lane:
        publication = learner.publication
        if publication is None:  # the descriptor of the weights was lost
            raise no_descriptor_left()
        with learner.playing(hello, stream):
            stream.expect(READ_GREETING, learner.limits.write_s)
            await write(encode_welcome(publication.offer, greeting, weights_dtype))
            stream.has_done(READ_GREETING)
            actor = _Actor(learner, stream, lane, publication, read, write)
            await first_of(
                actor.read_messages(), actor.carry_rollouts(), actor.send_weights(weights_dtype)
            )


@dataclass(eq=False)
class _Actor:
    """The stream of an actor, served by three tasks.

    The first reads messages. The second writes rollouts to the lane, and sends Taken once the
    learner has taken one. The third sends weights when the actor requests them.

    While a rollout waits for the learner, the next one is read, so that a request for weights
    behind it need not wait, too.
    """

    learner: LearnerConnection
    stream: Watched
    lane: Lane
    publication: Publication
    read: Read
    write: Write
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _rollouts: asyncio.Queue[bytes] = field(default_factory=lambda: asyncio.Queue(maxsize=1))
    _requests: asyncio.Queue[int] = field(default_factory=lambda: asyncio.Queue(maxsize=1))
    _is_asked: bool = False  # for weights
    _num_here: int = 0  # rollouts that were read and not yet taken by the learner
    # The last two versions sent, one of which the actor plays with.
    _sent: deque[int] = field(default_factory=lambda: deque(maxlen=2))

    async def read_messages(self) -> None:
        self._expect_rollout()
        while True:
            data = await self.read()
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
            self.stream.has_done(ROLLOUT)
            await self._rollouts.put(data)
            del data

    async def carry_rollouts(self) -> None:
        lane, lanes = self.lane, self.learner.lanes
        assert isinstance(lane.spec, RolloutSpec)
        reader = RolloutReader(lane.spec, lane.num_envs, lane.rows)
        while True:
            reader.read(await self._rollouts.get(), self.publication.version)
            if reader.info:
                lane.add_info(reader.info)
            if reader.num_unsent:
                self.learner.clients.count_unsent(self.stream, reader.num_unsent)
            lane.send_rows()
            if await lanes.wait_while(lane, AGENT) != ENVIRONMENT:
                raise self.learner.ending()
            self.stream.num_steps += lane.spec.unroll_length
            await self._send(encode_taken(self.publication.version))
            self._num_here -= 1
            self._expect_rollout()

    def _expect_rollout(self) -> None:
        """Set the deadline for the next rollout, unless one is here and waits for the learner."""
        if self._num_here == 0:
            self.stream.expect(ROLLOUT, self.learner.limits.rollout_s)

    def _may_be_late(self) -> bool:
        """Whether the actor's weights may be older than `max_policy_lag` allows.

        Such an actor sends no rollout, but requests newer weights and plays again.
        """
        most = self.publication.offer.max_policy_lag
        if most is None or not self._sent:
            return False
        return self.publication.version - self._sent[0] > most

    async def send_weights(self, dtype: str) -> None:
        publication = self.publication
        while True:
            version = await publication.after(await self._requests.get(), dtype)
            for start, data in version.pieces():
                if start + len(data) == len(version.data):
                    self._is_asked = False  # the actor may ask again once it has read this piece
                    self._sent.append(version.number)
                await self._send(encode_weights(version, start, data, publication.version))

    async def _send(self, data: bytes) -> None:
        async with self._writing:
            self.stream.expect(READ_WEIGHTS, self.learner.limits.write_s)
            await self.write(data)
            self.stream.has_done(READ_WEIGHTS)
