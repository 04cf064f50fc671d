"""For a simulator that calls the agent, instead of being called: a few lines and it is connected.

with torchbeast.connect("learner:4242", num_actions=3) as actor:
    action = actor.step(first_observation)
    while True:
        observation, reward, done = simulate(action)
        action = actor.step(observation, reward, done)
"""

import time
from types import TracebackType
from typing import Any

import numpy as np

import nest
from libtorchbeast.rpc.connection import BackOff, Connection, LearnerGone
from libtorchbeast.rpc.messages import Hello
from libtorchbeast.rpc.security import Security
from libtorchbeast.rpc.single import Episode, Row
from libtorchbeast.rpc.steps import ActionsReader, encode_step
from libtorchbeast.specs import ArraySpec, Spec, spec_of


class Actor:
    """One environment's line to the agent. Dials at the first step, and again when it must."""

    def __init__(
        self,
        address: str,
        num_actions: int = 0,
        action_spec: Any = None,
        name: str = "simulator",
        security: Security | None = None,
        reconnect_s: float = 600.0,
    ) -> None:
        """`num_actions` if actions are numbers from 0; `action_spec`, a nest of `ArraySpec`, if
        they are something else. The learner may be gone for `reconnect_s` seconds."""
        self._security = security or Security()
        self._security.check_dialing(address)
        self._address = address
        self._num_actions = num_actions
        self._action_spec = ArraySpec("int64") if action_spec is None else action_spec
        self._name = name
        self._reconnect_s = reconnect_s
        self._episode = Episode()
        self._connection: Connection | None = None
        self._reader: ActionsReader | None = None
        self._knows_truncation = True
        self._hello: Hello | None = None

    def __enter__(self) -> "Actor":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def step(
        self,
        observation: Any,
        reward: float = 0.0,
        done: bool = False,
        final_observation: Any = None,
    ) -> Any:
        """The agent's action for an observation, an array or a nest of arrays.

        `reward` is for the action before. After the end of an episode call with `done`, the last
        reward, and the first observation of the next episode. If it was a time limit that ended
        it, give the true `final_observation`, too, so that the agent knows that life went on.

        Raises `Refused` if the learner does not want this environment, and `LearnerGone` if there
        is none for too long.
        """
        if self._connection is None:
            return self._dial(observation)
        try:
            if done and final_observation is not None and self._knows_truncation:
                self._exchange(self._episode.row(final_observation, reward, done=False))
                return self._exchange(self._episode.row_after_time_limit(observation))
            return self._exchange(self._episode.row(observation, reward, done))
        except LearnerGone:
            self.close()
            return self._dial(observation)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _dial(self, observation: Any) -> Any:
        """Get through, and show the first row of a stream."""
        row = self._episode.first_row(observation)
        if self._hello is None:
            spec = Spec(spec_of(row["frame"]), self._action_spec)
            token = self._security.read_token()
            self._hello = Hello(self._name, 1, spec, self._num_actions, token)
            self._reader = ActionsReader(spec, 1)
        back_off = BackOff()
        deadline = time.monotonic() + self._reconnect_s
        while True:
            try:
                self._connection = Connection(self._address, self._security)
                greeting = self._connection.greet(self._hello)
                self._knows_truncation = greeting.knows_truncation
                return self._exchange(row)
            except LearnerGone:
                self.close()
                if time.monotonic() > deadline:
                    raise
                time.sleep(back_off.next_s())
            except BaseException:
                self.close()
                raise

    def _exchange(self, row: Row) -> Any:
        assert self._connection is not None
        assert self._reader is not None
        actions = self._reader.read(self._connection.exchange(encode_step(row)))
        return nest.map(_plain, actions)


def _plain(action: np.ndarray) -> Any:
    """[1, ...] to one array, or to a number that Python knows."""
    return action[0].item() if action.ndim == 1 else action[0].copy()
