"""A learner under attack, with a client beside it that must not notice."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

from tests.helpers.remote import Learner, check_rollouts, client, learner


@contextlib.contextmanager
def under_attack(security: Any = None, client_security: Any = None, **options: Any) -> Any:
    """The learner; afterwards the client has played on, every row is right, and nothing died."""
    options.setdefault("listen", ["127.0.0.1:0"])
    with learner(security=security, **options) as it:
        with client(it.address, security=client_security or security):
            it.wait_for_environments(1)
            pids = it.gateways.pids
            yield it
            it.wait_for_rollouts(5)
        assert it.gateways.pids == pids
        assert it.gateways.supervisor.num_restarts == 0
    assert sum(check_rollouts(rollouts_of_first(it), it.unroll_length).values()) > 20


def rollouts_of_first(it: Learner) -> list[Any]:
    """Of the environment that was there first."""
    first = it.rollouts[0][0]["frame"][0, 0, 0]
    return [rollout for rollout in it.rollouts if rollout[0]["frame"][0, 0, 0] == first]


class FakeProxy:
    """Listens on loopback, keeps what it gets, and answers nothing."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.received: list[bytes] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(10)
                with contextlib.suppress(OSError):
                    self.received.append(connection.recv(1 << 16))

    @classmethod
    @contextlib.contextmanager
    def running(cls) -> Iterator["FakeProxy"]:
        proxy = cls()
        proxy._thread.start()
        try:
            yield proxy
        finally:
            proxy._listener.shutdown(socket.SHUT_RDWR)
            proxy._listener.close()
            proxy._thread.join(30)
