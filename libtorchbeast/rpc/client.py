"""Environments that dial in: a group that plays with a learner that listens, wherever it is.

The learner may come and go; the environments stay. After a lost connection the newest row is the
first of the new stream.
"""

import contextlib
import logging
import threading
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

from libtorchbeast.environments import Environments, Row
from libtorchbeast.rpc.connection import BackOff, Connection, LearnerGone
from libtorchbeast.rpc.messages import Hello, Refused
from libtorchbeast.rpc.security import Security
from libtorchbeast.rpc.server import introduce
from libtorchbeast.rpc.single import without_truncation
from libtorchbeast.rpc.steps import ActionsReader, encode_step

logger = logging.getLogger("torchbeast")


class EnvironmentClient:
    """Steps environments with the actions of a learner, until it is stopped."""

    def __init__(
        self,
        make_environments: Callable[[], Environments],
        address: str,
        name: str = "environments",
        security: Security | None = None,
    ) -> None:
        self._security = security or Security()
        self._security.check_dialing(address)
        self._make_environments = make_environments
        self._address = address
        self._name = name
        self._stopped = threading.Event()
        self._connection: Connection | None = None
        self._knows_truncation = True
        self._told = ""

    def run(self) -> None:
        """Play until `stop()`.

        Raises `Refused` if the learner does not want these environments, and whatever the
        environments raise, after telling the learner.
        """
        environments = self._make_environments()
        try:
            self._play(environments)
        finally:
            environments.close()

    def stop(self) -> None:
        """Let `run()` return; from any thread."""
        self._stopped.set()
        if self._connection is not None:
            self._connection.close()

    def _play(self, environments: Environments) -> None:
        """One stream after the other."""
        row = environments.reset()
        hello = introduce(environments, row, self._name, self._security.read_token())
        reader = ActionsReader(hello.spec, hello.num_envs)
        back_off = BackOff()
        while not self._stopped.is_set():
            try:
                with contextlib.closing(self._connect(hello)) as connection:
                    row = as_first_row(row)
                    while not self._stopped.is_set():
                        actions = reader.read(self._show(row, connection))
                        back_off.reset()
                        row = self._step(environments, actions, connection)
                        if not self._knows_truncation:
                            row = without_truncation(row)
            except LearnerGone as gone:
                if self._stopped.is_set():
                    return
                why = str(gone).rstrip(".")
                self._tell(f"No learner at {self._address}: {why}. Calling again.")
                self._stopped.wait(back_off.next_s())

    def _connect(self, hello: Hello) -> Connection:
        connection = Connection(self._address, self._security)
        self._connection = connection
        try:
            if self._stopped.is_set():  # it was, before there was a connection to close
                raise LearnerGone("Stopped.")
            self._knows_truncation = connection.greet(hello).knows_truncation
        except BaseException:
            connection.close()
            raise
        self._tell(f"Playing with the learner at {self._address}.")
        return connection

    def _show(self, row: Row, connection: Connection) -> bytes:
        try:
            return connection.exchange(encode_step(row))
        except Refused as error:  # the next environments may do better
            raise RuntimeError(f"The learner refused what was sent: {error}") from error

    def _step(self, environments: Environments, actions: Any, connection: Connection) -> Row:
        try:
            return environments.step(actions)
        except Exception:
            connection.fail(traceback.format_exc())
            raise

    def _tell(self, text: str) -> None:
        if text != self._told:  # once, however often it is tried
            self._told = text
            logger.info(text)


def as_first_row(row: Row) -> Row:
    """A row as the first of a stream: nothing led to it."""
    zeros = {k: np.zeros_like(row[k]) for k in ("reward", "episode_step", "episode_return")}
    return {**row, **zeros, "done": np.ones_like(row["done"]),
            "truncated": np.zeros_like(row["truncated"])}  # fmt: skip
