"""The gateways as seen from the learner's process: supervised, and given lanes.

Nobody here waits but `open` and `wait_for_spec`: `poll()` looks at all of them, and the main thread
calls it a few times a second. Lanes belong to this side; a gateway gets their descriptors when it
asks, and uses them again for later streams. They outlive a gateway that dies: the one that takes
its place gets them, but for those that were handed over to hosts.
"""

import contextlib
import dataclasses
import logging
import os
import select
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from libtorchbeast.helper_process import Helper
from libtorchbeast.local_socket import JsonSocket, UnknownProtocol
from libtorchbeast.memory import memory_bytes
from libtorchbeast.rows import Spec
from libtorchbeast.rpc.address import Address
from libtorchbeast.rpc.gateway_config import DESCRIPTORS_PER_STREAM, GatewayConfig
from libtorchbeast.rpc.handshake import Refused, check_fit
from libtorchbeast.rpc.limits import Limits
from libtorchbeast.rpc.security import Security
from libtorchbeast.shared_lanes import (
    CLOSED,
    ENVIRONMENT,
    FREE,
    Lane,
    allow_descriptors,
    close_free_lane,
)
from libtorchbeast.specs import INT64, canonical
from libtorchbeast.supervisor import Child, Supervisor
from libtorchbeast.wait_notice import SAY_AGAIN_S, SAY_S

logger = logging.getLogger("torchbeast")

START_S = 60.0  # for a gateway to start
STOP_S = 5.0  # for it to end when it was asked to
HANG_S = 30.0  # a gateway without a heartbeat for so long hangs
WAIT_SLICE_S = 0.1
MEMORY_SHARE = 0.5  # of this machine's, for rollouts of environments elsewhere
MAX_NAMED = 4  # addresses in such a word


@dataclass(frozen=True)
class GatewaysConfig:
    """Where environments come from, and how much of them is taken."""

    listen: Sequence[str] = ()
    """Addresses for environments that dial in."""
    server_addresses: Sequence[str] = ()
    """Each gets a stream, or as many as the server there asks for; one may be there twice."""
    expects_servers: bool = True
    """Whether somebody is to be at each of them, and not only at some."""
    security: Security = field(default_factory=Security)
    limits: Limits = field(default_factory=Limits)
    num_gateways: int = 1
    max_groups: int | None = None
    """Of environments, all gateways together."""
    knows_truncation: bool = True
    rows_per_rollout: int = 1
    """Says how much memory an environment takes."""

    def check(self) -> None:
        """ValueError with one sentence."""
        if self.num_gateways < 1:
            raise ValueError(f"num_gateways must be at least 1, got {self.num_gateways}.")
        for address in self.listen:
            self.security.check_listening(address)
            if self.num_gateways > 1 and Address.parse(address).path:
                raise ValueError(
                    f"Several gateways cannot share a unix socket, got {address}; listen at a "
                    "port, or use one gateway."
                )
        for address in self.server_addresses:
            self.security.check_dialing(address)


@dataclass(eq=False)
class _Gateway:
    """One gateway: its lanes, which stay, and its line to us, which is as old as its process."""

    id: int
    bell_read_fd: int
    bell_write_fd: int
    listen: list[str]
    dial: list[str]
    lanes: list[Lane] = field(default_factory=list)
    lent: set[Lane] = field(default_factory=set)  # of `lanes`, to the process that runs now
    handed_over: set[Lane] = field(default_factory=set)  # of `lanes`, to hosts: used once
    requests: list[dict[str, Any]] = field(default_factory=list)  # for lanes, not yet granted
    granted: dict[int, Lane] = field(default_factory=dict)  # to the requests with these numbers
    child: Child = field(init=False)
    control: JsonSocket | None = None
    is_ready: bool = False
    failure: str = ""
    num_streams: int = 0
    waiting: dict[str, str] = field(default_factory=dict)

    def forget_process(self) -> None:
        """It is gone: nobody but hosts writes to its lanes any more."""
        if self.control is not None:
            self.control.close()
        self.control = None
        self.is_ready = False
        self.lent.clear()
        self.granted.clear()
        self.requests.clear()
        self.num_streams = 0
        self.waiting.clear()
        for lane in self.lanes:
            lane.turn.abandon()

    def forget_closed_lanes(self) -> None:
        for lane in self.handed_over - self.lent:  # their gateway died: the hosts must leave, too
            lane.turn.abandon()
            if lane.turn.state == FREE:
                lane.turn.close()
        for lane in [lane for lane in self.lanes if lane.turn.state == CLOSED]:
            lane.release()
            self.lanes.remove(lane)
            self.lent.discard(lane)
            self.handed_over.discard(lane)
            self.granted = {id: other for id, other in self.granted.items() if other is not lane}


class Gateways:
    """Processes in which connections from elsewhere end in lanes."""

    def __init__(
        self,
        config: GatewaysConfig,
        spec: Spec | None = None,
        on_environment_error: Callable[[str], None] | None = None,
        check_first: Callable[[Spec], None] | None = None,
    ) -> None:
        """Nothing is started yet. ValueError with one sentence if the configuration cannot work.

        Without a `spec` the first environments that introduce themselves decide;
        `check_first(spec)` may raise `Refused` for them.
        """
        config.check()
        self.spec = spec
        self._config = config
        self._add_lane: Callable[[Lane], None] | None = None
        self._on_environment_error = on_environment_error
        self._check_first = check_first
        self._is_closed = False
        self._say_at = time.monotonic() + SAY_S
        allow_descriptors(DESCRIPTORS_PER_STREAM * config.limits.max_streams * config.num_gateways)
        n = config.num_gateways
        self._gateways = [
            _new_gateway(i, list(config.listen), list(config.server_addresses)[i::n])
            for i in range(n)
        ]
        self.supervisor = Supervisor([], HANG_S, max_failures=None)

    @property
    def listening(self) -> list[str]:
        """The addresses where environments can dial in, with their ports."""
        return self._gateways[0].listen

    @property
    def num_streams(self) -> int:
        """Streams that are open."""
        return sum(gateway.num_streams for gateway in self._gateways)

    @property
    def pids(self) -> list[int]:
        return self.supervisor.pids

    def open(self) -> None:
        """Start them and wait until they listen; OSError with one sentence if they cannot."""
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

    def start(self, add_lane: Callable[[Lane], None]) -> None:
        """Let environments play: `add_lane` is called for each lane, once, from `poll`."""
        self._add_lane = add_lane
        self._say_at = time.monotonic() + SAY_S

    def poll(self) -> None:
        """Give lanes, log what the gateways say, restart those that died."""
        for gateway in self._gateways:
            self._read_messages(gateway)
        self.supervisor.poll()
        for gateway in self._gateways:
            self._grant(gateway)
        self._say_who_is_missing()

    def wait_for_spec(self, timeout_s: float) -> Spec:
        """Poll until environments have said what they are like; TimeoutError if none does."""
        deadline = time.monotonic() + timeout_s
        while self.spec is None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"No environments introduced themselves within {timeout_s} s.")
            self._wait_for_messages(min(left_s, WAIT_SLICE_S))
            self.poll()
        return self.spec

    def finish(self) -> None:
        """Say to environments elsewhere that training is finished; call it before `close`."""
        self._send_stop(finished=True)

    def close(self) -> None:
        """End all gateways and close their lanes; nothing is left."""
        if self._is_closed:
            return
        self._is_closed = True
        self.supervisor.close(self._stop, STOP_S)
        for gateway in self._gateways:
            for lane in gateway.lanes:
                lane.release()
            for fd in {gateway.bell_read_fd, gateway.bell_write_fd}:
                os.close(fd)

    # Processes.

    def _child(self, gateway: _Gateway) -> Child:
        def start(num_starts: int) -> Helper:
            return self._start(gateway)

        gateway.child = Child(f"Gateway {gateway.id}", start, gateway.forget_process)
        return gateway.child

    def _start(self, gateway: _Gateway) -> Helper:
        ours, theirs = socket.socketpair()
        if gateway.id > 0:  # a port that the system chose must be known
            gateway.listen = self._gateways[0].listen
        config = GatewayConfig(
            control_fd=theirs.fileno(),
            bell_fd=gateway.bell_read_fd,
            listen=gateway.listen,
            dial=gateway.dial,
            security=self._config.security.to_json(),
            limits=dataclasses.asdict(self._config.limits),
            share_port=self._config.num_gateways > 1,
            knows_truncation=self._config.knows_truncation,
        )
        gateway.control = JsonSocket(ours)
        with theirs:
            fds = [theirs.fileno(), gateway.bell_read_fd]
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
            for lane in gateway.lanes:
                lane.turn.close()
        self._send_stop(finished=False)

    def _send_stop(self, finished: bool) -> None:
        for gateway in self._gateways:
            if gateway.control is not None:
                with contextlib.suppress(OSError):  # it may be gone already
                    gateway.control.send("stop", finished=finished)

    # What they say.

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
            return  # it has ended, or will in a moment
        except UnknownProtocol as error:
            self.supervisor.fail(gateway.child, f"sent what cannot be read ({error})")

    def _handle(self, gateway: _Gateway, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "lane":
            self._hear_request(gateway, message)
        elif kind == "lost":  # a lane that did not arrive
            lane = gateway.granted.pop(message["id"], None)
            if lane is not None:
                lane.turn.close()
        elif kind == "streams":
            gateway.num_streams, gateway.waiting = message["number"], message["waiting"]
        elif kind == "ready":
            gateway.is_ready = True
            gateway.listen = message["addresses"]
        elif kind == "failed":
            gateway.failure = message["text"]
            if self._add_lane is not None:  # else `open` raises it
                logger.error("Gateway %d: %s", gateway.id, message["text"])
        elif kind == "environment_failed" and self._on_environment_error is not None:
            self._on_environment_error(message["text"])
        elif kind == "environment_failed":
            logger.warning("An environment at %s raised:\n%s", message["peer"], message["text"])
        elif kind == "info":
            logger.info("%s", message["text"])
        else:
            logger.warning("%s (%s)", message["text"], message["peer"])

    def _say_who_is_missing(self) -> None:
        """A learner that waits for environments says for whom, every now and then."""
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
        places += [f"whoever dials in at {address}" for address in self.listening]
        what = "more environments" if self.num_streams else "environments"
        # A warning if there is nobody: it is shown also where nobody has set up logging.
        level = logging.INFO if self.num_streams else logging.WARNING
        logger.log(level, "Waiting for %s: %s.", what, ", ".join(places) or "none was named")

    def _missing(self) -> list[str]:
        """Addresses where nobody is, and why."""
        waiting = [item for gateway in self._gateways for item in gateway.waiting.items()]
        return [f"{address} ({why})" for address, why in waiting]

    def late(self) -> list[str]:
        """Who keeps the learner waiting, for people. Whoever asks says so, and not our log."""
        self._say_at = max(self._say_at, time.monotonic() + SAY_S)
        lanes = [lane for gateway in self._gateways for lane in gateway.lanes]
        late = [lane for lane in lanes if lane.turn.state == ENVIRONMENT]
        names = [f"{len(late)} of {self.num_streams} groups of environments elsewhere"] * bool(late)
        names += [f"whoever dials in at {address}" for address in self.listening]
        return names + self._missing()

    # Lanes.

    def _hear_request(self, gateway: _Gateway, request: dict[str, Any]) -> None:
        """For a lane; of the first environments, which say what all are to be like."""
        try:
            self._learn_spec(request)
            gateway.requests.append(request)
        except Exception as error:  # nothing that comes from outside ends a run
            self._reply(gateway, request, refusal_of(as_refusal(error)))

    def _learn_spec(self, request: dict[str, Any]) -> None:
        spec = Spec.from_json(request["spec"])
        if self.spec is None:
            if self._check_first is not None:
                self._check_first(spec)
            self.spec = spec
        if self.spec.action == INT64 and canonical(spec.action) == INT64:  # nobody said how many
            self.spec = dataclasses.replace(self.spec, action=spec.action)

    def _grant(self, gateway: _Gateway) -> None:
        if self._add_lane is None:
            return
        gateway.forget_closed_lanes()
        while gateway.requests:
            request = gateway.requests.pop(0)
            try:
                answer = self._answer(gateway, request)
            except Exception as error:  # no descriptor or thread is left, perhaps
                answer = refusal_of(as_refusal(error))
            self._reply(gateway, request, answer)

    def _reply(self, gateway: _Gateway, request: dict[str, Any], answer: dict[str, Any]) -> None:
        if gateway.control is not None:
            with contextlib.suppress(OSError):  # it has died; the next poll restarts it
                gateway.control.send(id=request["id"], **answer)

    def _answer(self, gateway: _Gateway, request: dict[str, Any]) -> dict[str, Any]:
        """A lane for a gateway that asks for one, or `Refused`."""
        spec = Spec.from_json(request["spec"])
        assert self.spec is not None  # `_learn_spec` was first
        check_fit(self.spec, spec)
        lane = self._find_lane(gateway, request["num_envs"], request["hand_over"])
        gateway.lent.add(lane)
        gateway.granted[request["id"]] = lane
        return {
            "kind": "lane",
            "fd": lane.fd,
            "spec": self.spec.to_json(),
            "num_envs": lane.num_envs,
        }

    def _find_lane(self, gateway: _Gateway, num_envs: int, hand_over: bool) -> Lane:
        """A lane that no stream has; a new one if need be."""
        unused = [lane for lane in gateway.lanes if lane not in gateway.lent | gateway.handed_over]
        for lane in unused:
            if lane.num_envs == num_envs and not hand_over:
                return lane
        self._check_places(gateway, unused)
        assert self.spec is not None
        assert self._add_lane is not None
        self._check_memory(self.spec, num_envs)
        lane = Lane.create(self.spec, num_envs)
        if not hand_over:
            lane.bell_fd = gateway.bell_write_fd
        try:
            self._add_lane(lane)
        except BaseException:
            lane.close()
            raise
        gateway.lanes.append(lane)
        if hand_over:
            gateway.handed_over.add(lane)
        return lane

    def _check_places(self, gateway: _Gateway, unused: list[Lane]) -> None:
        if len(gateway.lanes) >= self._config.limits.max_streams:
            close_free_lane(unused)
            gateway.forget_closed_lanes()
        if len(gateway.lanes) >= self._config.limits.max_streams:
            raise Refused(
                "RESOURCE_EXHAUSTED",
                f"The learner has {len(gateway.lanes)} lanes and makes no more.",
            )
        most = self._config.max_groups
        if most is not None and sum(len(g.lent) for g in self._gateways) >= most:
            raise Refused(
                "RESOURCE_EXHAUSTED",
                f"The learner plays with {most} groups (--num_actors) and has them all.",
            )

    def _check_memory(self, spec: Spec, num_envs: int) -> None:
        """Rollouts of all environments, one in the making and one on its way each, must fit."""
        others = sum(lane.num_envs for gateway in self._gateways for lane in gateway.lanes)
        num_bytes = 2 * (others + num_envs) * self._config.rows_per_rollout * spec.row_bytes
        if num_bytes > MEMORY_SHARE * memory_bytes():
            raise Refused(
                "RESOURCE_EXHAUSTED",
                f"Rollouts of {num_envs} more environments would take the learner's memory: "
                f"{num_bytes >> 20} MiB in all of {memory_bytes() >> 20}.",
            )


def _new_gateway(id: int, listen: list[str], dial: list[str]) -> _Gateway:
    if hasattr(os, "eventfd"):
        read_fd = write_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    else:
        read_fd, write_fd = os.pipe()
        os.set_blocking(write_fd, False)
    return _Gateway(id, read_fd, write_fd, listen, dial)


def as_refusal(error: Exception) -> Refused:
    """Of environments that cannot be taken, for whatever reason."""
    if isinstance(error, Refused):
        return error
    logger.error("Environments are turned away, there is no lane for them: %s", error)
    return Refused("RESOURCE_EXHAUSTED", "The learner cannot take more environments now; wait.")


def refusal_of(refused: Refused) -> dict[str, Any]:
    return {"kind": "refuse", "code": refused.code, "text": str(refused)}
