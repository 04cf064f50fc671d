"""The gateways as seen from the learner's process, which supervises them and grants them lanes.

The main thread calls `poll()` a few times a second. Only `open` and `wait_for_spec` wait for
messages of the gateways. Lanes are granted in lane_grants.py.
"""

import dataclasses
import logging
import os
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from libtorchbeast.helper_process import Helper
from libtorchbeast.json_socket import JsonSocket, UnknownProtocol
from libtorchbeast.rollout_layout import ModelOffer
from libtorchbeast.rows import Spec
from libtorchbeast.rpc.connected_clients import ClientFigures, make_room
from libtorchbeast.rpc.gateway_config import DESCRIPTORS_PER_STREAM, GatewayConfig, GatewaysConfig
from libtorchbeast.rpc.lane_grants import GatewayLanes, LaneGrants
from libtorchbeast.shared_lanes import ENVIRONMENT, Lane, allow_descriptors
from libtorchbeast.supervisor import NO_ROOM, Child, Supervisor
from libtorchbeast.wait_notice import SAY_AGAIN_S, SAY_S

logger = logging.getLogger("torchbeast")

START_S = 60.0  # for a gateway to start
STOP_S = 5.0  # for it to end when it was asked to
HANG_S = 30.0  # without a heartbeat, until a gateway is restarted
WAIT_SLICE_S = 0.1  # between two calls of `poll` while something is waited for
MAX_NAMED = 4  # addresses that a message about missing environments names


@dataclass(eq=False)
class _Gateway:
    """One gateway: its lanes, which outlive its process, and the state of that process."""

    id: int
    wakeup_read_fd: int
    lanes: GatewayLanes
    listen: list[str]
    dial: list[str]
    child: Child = field(init=False)
    control: JsonSocket | None = None
    is_ready: bool = False
    failure: str = ""
    num_streams: int = 0
    waiting: dict[str, str] = field(default_factory=dict)  # by address: why nothing plays
    clients: dict[str, ClientFigures] = field(default_factory=dict)  # by their keys

    def forget_process(self) -> None:
        """Reset the state of the process, which has ended."""
        if self.control is not None:
            self.control.close()
        self.control = None
        self.is_ready = False
        self.num_streams = 0
        self.waiting.clear()
        for figures in self.clients.values():
            figures.streams = figures.environments = 0
        self.lanes.forget_process()

    def send(self, kind: str, **values: Any) -> bool:
        """Send a message; return False if its file descriptor cannot be duplicated now."""
        if self.control is not None:
            try:
                self.control.send(kind, **values)
            except OSError as error:
                return error.errno not in NO_ROOM  # else it has died; the next poll restarts it
        return True


class Gateways:
    """The gateway processes of a learner."""

    def __init__(
        self,
        config: GatewaysConfig,
        spec: Spec | None = None,
        on_environment_error: Callable[[str], None] | None = None,
        check_first: Callable[[Spec], None] | None = None,
    ) -> None:
        """Start nothing yet; raise ValueError with one sentence if `config` cannot work.

        Without a `spec`, the first environments that introduce themselves determine it;
        `check_first(spec)` may raise `Refused` to refuse them.
        """
        config.check()
        self._config = config
        self._on_environment_error = on_environment_error
        self._is_closed = False
        self._say_at = time.monotonic() + SAY_S
        allow_descriptors(DESCRIPTORS_PER_STREAM * config.limits.max_streams * config.num_gateways)
        n = config.num_gateways
        self._gateways = [
            _new_gateway(i, list(config.listen), list(config.server_addresses)[i::n])
            for i in range(n)
        ]
        all_lanes = [gateway.lanes for gateway in self._gateways]
        self._grants = LaneGrants(config, spec, check_first, all_lanes)
        self.supervisor = Supervisor([], HANG_S, max_failures=None)

    @property
    def spec(self) -> Spec | None:
        """The spec of all environments, once it is known."""
        return self._grants.spec

    @property
    def listening(self) -> list[str]:
        """The addresses where environments can dial in, with their ports."""
        return self._gateways[0].listen

    @property
    def num_streams(self) -> int:
        """The number of streams that play."""
        return sum(gateway.num_streams for gateway in self._gateways)

    @property
    def num_lanes(self) -> int:
        """The number of lanes, in use or not."""
        return sum(len(gateway.lanes.lanes) for gateway in self._gateways)

    @property
    def pids(self) -> list[int]:
        return self.supervisor.pids

    @property
    def clients(self) -> list[ClientFigures]:
        """Figures about all known clients, summed over gateways."""
        merged: dict[str, ClientFigures] = {}
        for gateway in self._gateways:
            for figures in gateway.clients.values():
                before = merged.get(figures.key)
                merged[figures.key] = figures if before is None else before.merged(figures)
        return list(merged.values())

    def open(self) -> None:
        """Start the gateways and wait until they listen; raise OSError if they cannot."""
        try:
            for gateway in self._gateways:  # one after the other: they share the first one's port
                self.supervisor.children.append(self._child(gateway))
                deadline = time.monotonic() + START_S
                while not gateway.is_ready:
                    self._check_start(gateway, deadline)
                    self.poll()
                    self._wait_for_messages(WAIT_SLICE_S)
        except BaseException:
            self.close()
            raise

    def start(
        self,
        add_lane: Callable[[Lane], None],
        offer_model: Callable[[], ModelOffer] | None = None,
    ) -> None:
        """Let environments play; `poll` then calls `add_lane` once for each new lane.

        With `offer_model`, actors that carry the model are accepted, too, and their lanes hold
        whole rollouts. It is called once, when the first such actor connects.
        """
        self._grants.add_lane = add_lane
        self._grants.offer_model = offer_model
        self._say_at = time.monotonic() + SAY_S

    def poll(self) -> None:
        """Grant lanes, log what the gateways report, and restart gateways that died."""
        for gateway in self._gateways:
            self._read_messages(gateway)
        self.supervisor.poll()
        for gateway in self._gateways:
            self._grants.answer_requests(gateway.lanes, gateway.send)
        self._say_who_is_missing()

    def wait_for_spec(self, timeout_s: float) -> Spec:
        """Poll until environments have introduced themselves; raise TimeoutError if none do."""
        deadline = time.monotonic() + timeout_s
        while self.spec is None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"No environments introduced themselves within {timeout_s} s.")
            self._wait_for_messages(min(left_s, WAIT_SLICE_S))
            self.poll()
        return self.spec

    def decide(self, spec: Spec) -> None:
        """Accept environments of this spec only; call it before `start`, which lets them play."""
        self._grants.spec = spec

    def finish(self) -> None:
        """Send clients the status that training is finished; call it before `close`."""
        self._send_stop(finished=True)

    def close(self) -> None:
        """End all gateways, close their lanes, and release all descriptors."""
        if self._is_closed:
            return
        self._is_closed = True
        self.supervisor.close(self._stop, STOP_S)
        for gateway in self._gateways:
            for lane in gateway.lanes.lanes:
                lane.release()
            for fd in {gateway.wakeup_read_fd, gateway.lanes.wakeup_fd}:
                os.close(fd)

    # Processes.

    def _child(self, gateway: _Gateway) -> Child:
        def start(num_starts: int) -> Helper:
            return self._start(gateway)

        gateway.child = Child(f"Gateway {gateway.id}", start, gateway.forget_process)
        return gateway.child

    def _start(self, gateway: _Gateway) -> Helper:
        ours, theirs = socket.socketpair()
        if gateway.id > 0:  # the port that the system may have chosen for the first gateway
            gateway.listen = self._gateways[0].listen
        config = GatewayConfig(
            control_fd=theirs.fileno(),
            wakeup_fd=gateway.wakeup_read_fd,
            listen=gateway.listen,
            dial=gateway.dial,
            security=self._config.security,
            limits=self._config.limits,
            share_port=self._config.num_gateways > 1,
            knows_truncation=self._config.knows_truncation,
        )
        gateway.control = JsonSocket(ours)
        with theirs:
            fds = [theirs.fileno(), gateway.wakeup_read_fd]
            return Helper("libtorchbeast.rpc.gateway", config.to_json(), fds, needs_token=True)

    def _check_start(self, gateway: _Gateway, deadline: float) -> None:
        if gateway.failure:
            raise OSError(gateway.failure)
        if self.supervisor.num_restarts:
            raise RuntimeError("A gateway ended at its start; see its log.")
        if time.monotonic() > deadline:
            raise TimeoutError(f"A gateway did not start within {START_S:.0f} s.")

    def _stop(self) -> None:
        for gateway in self._gateways:
            for lane in gateway.lanes.lanes:
                lane.turn.close()
        self._send_stop(finished=False)

    def _send_stop(self, finished: bool) -> None:
        for gateway in self._gateways:
            gateway.send("stop", finished=finished)

    # Messages of the gateways.

    def _wait_for_messages(self, timeout_s: float) -> None:
        poll = select.poll()
        for gateway in self._gateways:
            if gateway.control is not None:
                poll.register(gateway.control.fileno(), select.POLLIN)
        poll.poll(1000 * timeout_s)

    def _read_messages(self, gateway: _Gateway) -> None:
        try:
            while gateway.control is not None:
                message = gateway.control.next()
                if message is None:
                    return
                self._handle(gateway, message)
        except (EOFError, OSError):
            return  # the gateway has ended, or will in a moment
        except UnknownProtocol as error:
            self.supervisor.fail(gateway.child, f"sent what cannot be read ({error})")

    def _handle(self, gateway: _Gateway, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "lane":
            self._grants.add_request(gateway.lanes, message, gateway.send)
        elif kind == "lost":
            gateway.lanes.close_lost(message["id"])
            gateway.lanes.knows_model = False  # its message may be lost, too: send it again
        elif kind == "streams":
            gateway.num_streams, gateway.waiting = message["number"], message["waiting"]
        elif kind == "client":
            if message["key"] not in gateway.clients:
                make_room(gateway.clients)
            gateway.clients[message["key"]] = ClientFigures(
                **{field.name: message[field.name] for field in dataclasses.fields(ClientFigures)}
            )
        elif kind == "ready":
            gateway.is_ready = True
            gateway.listen = message["addresses"]
        elif kind == "failed":
            gateway.failure = message["text"]
            if self._grants.add_lane is not None:  # else `open` raises it
                logger.error("Gateway %d: %s", gateway.id, message["text"])
        elif kind == "environment_failed" and self._on_environment_error is not None:
            self._on_environment_error(message["text"])
        elif kind == "environment_failed":
            last = message["text"].rstrip().rpartition("\n")[2]  # its own log has the traceback
            logger.warning("An environment at %s raised: %s", message["peer"], last)
        elif kind == "info":
            logger.info("%s", message["text"])
        else:
            logger.warning("%s (%s)", message["text"], message["peer"])

    def _say_who_is_missing(self) -> None:
        """Log which environments the learner waits for, after ten seconds and every minute."""
        now = time.monotonic()
        if now < self._say_at:
            return
        missing = self._missing()
        if self.num_streams > 0 and not (missing and self._config.expects_servers):
            self._say_at = now + SAY_S
            return
        self._say_at = now + SAY_AGAIN_S
        places = missing[:MAX_NAMED]
        if len(missing) > MAX_NAMED:
            places.append(f"{len(missing) - MAX_NAMED} more")
        places += [f"clients that dial in at {address}" for address in self.listening]
        what = "more environments" if self.num_streams else "environments"
        # A warning if nothing plays: it is shown even where logging has not been set up.
        level = logging.INFO if self.num_streams else logging.WARNING
        logger.log(
            level, "Waiting for %s: %s.", what, ", ".join(places) or "no server has answered yet"
        )

    def _missing(self) -> list[str]:
        """Return the dialled addresses without environments, each with the reason."""
        waiting = [item for gateway in self._gateways for item in gateway.waiting.items()]
        return [f"{address} ({why})" for address, why in waiting]

    def late(self) -> list[str]:
        """Describe the environments that keep the learner waiting, for a message to the user.

        The caller shows the message, so `poll` does not log one for a while.
        """
        self._say_at = max(self._say_at, time.monotonic() + SAY_S)
        lanes = [lane for gateway in self._gateways for lane in gateway.lanes.lanes]
        late = [lane for lane in lanes if lane.turn.state == ENVIRONMENT]
        names = [f"{len(late)} of {self.num_streams} groups of environments elsewhere"] * bool(late)
        names += [f"clients that dial in at {address}" for address in self.listening]
        return names + self._missing()


def _new_gateway(id: int, listen: list[str], dial: list[str]) -> _Gateway:
    if hasattr(os, "eventfd"):
        read_fd = write_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    else:
        read_fd, write_fd = os.pipe()
        os.set_blocking(write_fd, False)
    return _Gateway(id, read_fd, GatewayLanes(write_fd), listen, dial)
