"""Connects a simulator with a main loop of its own, which calls the agent, to a learner.

with torchbeast.connect("learner:4242", num_actions=3) as actor:
    action = actor.step(first_observation)
    while True:
        observation, reward, done = simulate(action)
        action = actor.step(observation, reward, done)
"""

import asyncio
import logging
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any

import numpy as np

from libtorchbeast.action_masks import ActionMasks, find_masks
from libtorchbeast.env_host import ActionCheck, BadAnswer
from libtorchbeast.episode_info import InfoSums, add_info
from libtorchbeast.lane_scheduler import LaneScheduler
from libtorchbeast.log_repeats import RepeatFilter
from libtorchbeast.observations import RowCheck, fit
from libtorchbeast.rows import EpisodeCounter, Row, Spec
from libtorchbeast.rpc import grpc_loops
from libtorchbeast.rpc.address import Address
from libtorchbeast.rpc.dialing import (
    LanesImpossible,
    LearnerFinished,
    LearnerGone,
    NotReady,
    dial_lane,
    dial_stream,
    dialing_back_off,
    pause_of,
    token_now,
    why_closed,
)
from libtorchbeast.rpc.handshake import Hello
from libtorchbeast.rpc.security import Security
from libtorchbeast.shared_lanes import LaneClosed
from libtorchbeast.specs import (
    ACTION_MASK,
    INT64,
    agents_action,
    discrete,
    environments_action,
    observation_spec_of,
    spec_of,
    spec_or,
    with_bounds,
)
from libtorchbeast.tree import map_tree

logger = logging.getLogger("torchbeast")

NO, YES = np.array([False]), np.array([True])
JOIN_S = 5.0
LOOK_S = 1.0  # between two checks that the stream's thread is alive


class Actor:
    """Connects one environment to the agent: dials at the first step, and after a lost link."""

    def __init__(
        self,
        address: str,
        num_actions: int = 0,
        action_spec: Any = None,
        name: str = "simulator",
        security: Security | None = None,
        reconnect_s: float = 600.0,
        observation_space: Any = None,
        action_space: Any = None,
    ) -> None:
        """Describe the actions by `num_actions` if they are integers from 0 on, by an `action_spec`
        (a nest of `ArraySpec`), or by an `action_space` of Gymnasium, whose `start` is added.

        With an `observation_space`, observations are converted to its dtypes, and the learner
        scales by its bounds. While there is no learner, `step` waits for `reconnect_s` seconds.
        """
        self._security = security or Security()
        self._security.check_dialing(address)
        self._address = address
        spec_or(None, observation_space)  # raises UnknownSpace if it cannot be used
        self._observation_spec = observation_spec_of(observation_space)
        if action_spec is None:
            action_spec = discrete(num_actions) if num_actions else INT64
        self._taken_action = spec_or(action_spec, action_space)
        self._action_spec = agents_action(self._taken_action)
        self._check = ActionCheck(self._action_spec)
        self._masks: ActionMasks | None = None
        self._has_stepped = False
        self._name = name
        self._reconnect_s = reconnect_s
        self._counter = EpisodeCounter(1, self._action_spec)
        self._last_action = map_tree(lambda s: np.zeros((1, *s.shape), s.dtype), self._action_spec)
        self._repeats = RepeatFilter()
        self._line: LaneLine | StreamLine | None = None
        self._takes_lanes = bool(Address.parse(address).path)

    def __enter__(self) -> "Actor":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def step(
        self,
        observation: Any,
        reward: float = 0.0,
        done: bool = False,
        final_observation: Any = None,
        info: dict[str, Any] | None = None,
        action_mask: Any = None,
    ) -> Any:
        """Return the agent's action for an observation, which is an array or a nest of arrays.

        `reward` is for the previous action. After the end of an episode, call with `done`, the last
        reward, and the first observation of the next episode. If a time limit ended the episode,
        also give the true `final_observation`, so that the agent does not take the limit for an
        end. Numbers in `info`, if given with `done`, are averaged in the learner's logs.
        `action_mask` says which actions are possible now; so does a part of that name in a dict.

        Raise ValueError for numbers that are not finite or beyond 1e9, and for data that does not
        fit the spaces; `Refused` if the learner refuses this environment; `LearnerFinished` when
        training is finished; and `LearnerGone` if there is no learner for `reconnect_s` seconds.
        """
        frame = self._see(observation, action_mask)
        if self._line is None:
            return self._dial(frame)
        sums: InfoSums = {}
        if done:
            add_info(sums, info)
        try:
            if done and final_observation is not None and self._line.knows_truncation:
                final = self._see(final_observation, None, is_last=True)
                self._show(self._row(final, reward, NO))
                return self._show(self._row(frame, 0.0, YES, truncated=YES), sums)
            return self._show(self._row(frame, reward, YES if done else NO), sums)
        except (LearnerGone, BadAnswer) as gone:
            self.close()
            if isinstance(gone, LearnerFinished):
                raise
            return self._dial(frame)

    def close(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None

    def _see(self, observation: Any, action_mask: Any, is_last: bool = False) -> Any:
        """Return a frame [1, ...]: an observation in its declared dtypes, with its mask if any."""
        said = {} if action_mask is None and not is_last else {ACTION_MASK: action_mask}
        if not self._has_stepped:
            if said:
                self._masks = ActionMasks(self._action_spec, "action_mask=")
            else:
                self._masks = find_masks(None, observation, {}, self._action_spec)
            self._has_stepped = True
        if self._masks is not None:
            observation = self._masks.add(None, observation, said, is_last)
        elif action_mask is not None:
            raise ValueError("An action_mask must be given at each step, got none at the first.")
        if self._declared is not None:
            observation = fit(observation, self._declared)
        return map_tree(lambda leaf: np.asarray(leaf)[None], observation)

    @property
    def _declared(self) -> Any:
        """The spec of frames according to `observation_space`; None without one."""
        spec = self._observation_spec
        return spec if self._masks is None else self._masks.spec(spec)

    def _row(self, frame: Any, reward: float, done: np.ndarray, truncated: np.ndarray = NO) -> Row:
        rewards = np.array([reward], np.float64)
        return self._counter.row(frame, rewards, done, truncated, self._last_action)

    def _dial(self, frame: Any) -> Any:
        """Dial until there is a learner; return the action for the first row of a new stream."""
        row = self._counter.first_row(frame)
        observation_spec = with_bounds(spec_of(frame), self._declared)
        spec = Spec(observation_spec, self._action_spec)
        self._check_row = RowCheck(observation_spec)
        back_off = dialing_back_off()
        deadline = time.monotonic() + self._reconnect_s
        while True:
            try:
                token = token_now(self._security)
                hello = Hello(self._name, 1, spec, token)
                self._line = self._open_line(hello)
                return self._show(row)
            except (LearnerGone, BadAnswer, NotReady) as gone:
                self.close()
                if isinstance(gone, LearnerFinished):
                    raise
                left_s = deadline - time.monotonic()
                if left_s < 0:
                    raise LearnerGone(str(gone)) from gone
                shown = self._repeats.take(str(gone))
                if shown is not None:  # a warning is shown even where logging is not set up
                    logger.warning("Waiting for a learner at %s, for up to %.0f s: %s",
                                   self._address, left_s, shown)  # fmt: skip
                time.sleep(pause_of(gone, back_off))
            except BaseException:
                self.close()
                raise

    def _open_line(self, hello: Hello) -> "LaneLine | StreamLine":
        if self._takes_lanes:
            try:
                return LaneLine(self._address, hello)
            except LanesImpossible:
                self._takes_lanes = False
        return StreamLine(self._address, self._security, hello)

    def _show(self, row: Row, info: InfoSums | None = None) -> Any:
        assert self._line is not None
        self._check_row(row)  # rows of a lane are checked nowhere else
        actions = self._line.show(row, info)
        self._check(actions)
        self._last_action = map_tree(np.copy, actions)
        return map_tree(_plain, environments_action(self._taken_action, actions))


class LaneLine:
    """A lane to the agent; the calling thread blocks while it waits for actions."""

    def __init__(self, address: str, hello: Hello) -> None:
        self._connection, self._link, greeting = _complete(dial_lane(address, hello))
        self.knows_truncation = greeting.knows_truncation

    def show(self, row: Row, info: InfoSums | None = None) -> Any:
        try:
            return _complete(self._link.show(row, info))
        except LaneClosed as error:
            raise _complete(why_closed(self._link, self._connection)) from error

    def close(self) -> None:
        self._connection.close()


def _complete(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end in a `LaneScheduler`, and return its result."""
    result: list[Any] = []

    async def run() -> None:
        result.append(await coroutine)

    scheduler = LaneScheduler()
    scheduler.add(run())
    scheduler.run()
    return result[0]


_Request = tuple[Row, InfoSums | None]


class StreamLine:
    """A gRPC stream to the agent.

    It has an event loop in a thread of its own, as the caller's thread may run another loop.
    """

    def __init__(self, address: str, security: Security, hello: Hello) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None  # while the stream lives
        self._requests: asyncio.Queue[tuple[_Request | None, Future[Any]]] = asyncio.Queue()
        opened: Future[Any] = Future()
        self._thread = threading.Thread(
            target=grpc_loops.run,
            args=(self._play(address, security, hello, opened),),
            name="connect",
            daemon=True,
        )
        self._thread.start()
        try:
            self.knows_truncation = self._result_of(opened).knows_truncation
        except BaseException:
            self.close()
            raise

    def show(self, row: Row, info: InfoSums | None = None) -> Any:
        return self._result_of(self._request((row, info)))

    def _result_of(self, answer: Future[Any]) -> Any:
        """Wait for the answer to a request; raise `LearnerGone` if the thread ends before."""
        while True:
            try:
                return answer.result(LOOK_S)
            except TimeoutError:
                if not self._thread.is_alive():  # it ended before it saw the request
                    raise LearnerGone("The stream is over.") from None

    def close(self) -> None:
        self._request(None)
        self._thread.join(JOIN_S)

    def _request(self, request: "_Request | None") -> Future[Any]:
        """Pass a row to the stream's thread (None: end the stream); return the future answer."""
        answer: Future[Any] = Future()
        loop = self._loop
        if loop is None:
            answer.set_exception(LearnerGone("The stream is over."))
        else:
            loop.call_soon_threadsafe(self._requests.put_nowait, (request, answer))
        return answer

    async def _play(
        self, address: str, security: Security, hello: Hello, opened: Future[Any]
    ) -> None:
        """Run the stream from start to end; an error that ends it answers the open request."""
        from libtorchbeast.rpc.grpc_streams import Watched, watch

        self._loop = asyncio.get_running_loop()
        streams: set[Watched] = set()
        watcher = asyncio.create_task(watch(streams, lambda: None))
        answer = opened
        try:
            async with dial_stream(address, security, hello, streams) as (_, link, greeting):
                opened.set_result(greeting)
                while True:
                    request, answer = await self._requests.get()
                    if request is None:
                        return
                    answer.set_result(await link.show(*request))
        except Exception as error:
            self._loop = None
            answer.set_exception(error)
        finally:
            self._loop = None
            watcher.cancel()


def _plain(action: np.ndarray) -> Any:
    """Return the only entry of an array [1, ...], as an array or as a Python number."""
    return action[0].item() if action.ndim == 1 else action[0].copy()
