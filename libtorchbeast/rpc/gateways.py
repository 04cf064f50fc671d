"""The gateways as seen from the learner's process: started, watched over, mended, ended.

Nobody here waits: `poll()` looks around, and the main thread calls it a few times a second. Lanes
belong to this side; a gateway gets their descriptors when it asks, and uses them again for later
streams. They outlive a gateway that dies: the one that takes its place gets them.
"""

import contextlib
import logging
import os
import select
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from libtorchbeast.lanes import CLOSED, Lane, allow_descriptors, close_free_lane
from libtorchbeast.rpc.control import ControlSocket
from libtorchbeast.rpc.gateway_config import DESCRIPTORS_PER_STREAM, GatewayConfig
from libtorchbeast.rpc.messages import Refused, canonical, check_fit, row_bytes
from libtorchbeast.rpc.security import Address, Limits, Security
from libtorchbeast.specs import Spec
from libtorchbeast.workers import describe_exit, kill_group, start_helper

logger = logging.getLogger("torchbeast")

START_S = 60.0  # for a gateway to start
STOP_S = 5.0  # for it to end when it was told to
RESTART_PAUSE_S = 1.0  # after a gateway that died soon after its start
WAIT_SLICE_S = 0.1
HANG_S = 30.0  # a gateway that says nothing for so long hangs
MAX_GAP_S = 2.0  # more time between two polls is no sign of that
MEMORY_SHARE = 0.5  # of this machine's, for rollouts of environments elsewhere
CONTAINER_MEMORY = [  # where version 2 and version 1 of control groups say how much there is
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
]


@dataclass
class _Gateway:
    """One gateway: its lanes, which stay, and its process, which may be replaced."""

    id: int
    bell_read_fd: int
    bell_write_fd: int
    listen: list[str]
    dial: list[str]
    lanes: list[Lane] = field(default_factory=list)
    lent: set[Lane] = field(default_factory=set)  # of `lanes`, to the process that runs now
    wishes: list[dict[str, Any]] = field(default_factory=list)  # for lanes, not yet granted
    process: subprocess.Popen[bytes] | None = None
    control: ControlSocket | None = None
    is_ready: bool = False
    started_at: float = 0.0
    start_at: float = 0.0
    num_streams: int = 0
    silent_s: float = 0.0


class Gateways:
    """Processes that end streams from other machines in lanes."""

    def __init__(
        self,
        add_lane: Callable[[Lane], None] | None = None,
        spec: Spec | None = None,
        num_actions: int | None = None,
        listen: Sequence[str] = (),
        server_addresses: Sequence[str] = (),
        security: Security | None = None,
        limits: Limits | None = None,
        num_gateways: int = 1,
        knows_truncation: bool = True,
        rows_per_rollout: int = 1,
        on_environment_error: Callable[[str], None] | None = None,
        check_first: Callable[[Spec, int], None] | None = None,
    ) -> None:
        """Starts them; ValueError or OSError with one sentence if that cannot work.

        `add_lane` may also be given later, to `start`; until then environments are kept waiting.
        Without a `spec` the first environments that introduce themselves decide. Each entry of
        `server_addresses` gets a stream, or as many as the server there asks for; an address may be
        there several times. `rows_per_rollout` says how much memory an environment takes.
        `check_first(spec, num_actions)` may raise `Refused` for environments that were to decide.
        """
        self.spec = spec
        self.num_actions = num_actions or None
        self._add_lane = add_lane
        self._security = security or Security()
        self._limits = limits or Limits()
        self._knows_truncation = knows_truncation
        self._rows_per_rollout = rows_per_rollout
        self._on_environment_error = on_environment_error
        self._check_first = check_first
        self._is_closed = False
        self._polled_at = time.monotonic()
        self.num_restarts = 0
        self._check(listen, server_addresses, num_gateways)
        allow_descriptors(DESCRIPTORS_PER_STREAM * self._limits.max_streams * num_gateways)
        self._share_port = num_gateways > 1
        self._gateways = [
            self._new_gateway(i, list(listen), list(server_addresses)[i::num_gateways])
            for i in range(num_gateways)
        ]
        try:
            for gateway in self._gateways:
                # A unix socket cannot be shared, and a port that the system chose must be known.
                self._start(gateway)
                self._wait_until_ready(gateway)
        except BaseException:
            self.close()
            raise

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
        return [g.process.pid for g in self._gateways if g.process is not None]

    def start(self, add_lane: Callable[[Lane], None]) -> None:
        """Let environments play: `add_lane` is called for each lane, once, from `poll`."""
        self._add_lane = add_lane

    def poll(self) -> None:
        """Give lanes, pass on what the gateways say, start those anew that died."""
        now = time.monotonic()
        # While this process was stopped (Ctrl-Z, a sleeping laptop), so were the gateways.
        passed_s, self._polled_at = min(now - self._polled_at, MAX_GAP_S), now
        for gateway in self._gateways:
            if gateway.process is None:
                if now >= gateway.start_at:
                    self._start(gateway)
                continue
            gateway.silent_s += passed_s
            self._hear(gateway)
            if gateway.process.poll() is not None:
                self._mend(gateway, describe_exit(gateway.process.returncode))
            elif gateway.silent_s > (HANG_S if gateway.is_ready else START_S):
                self._mend(gateway, f"said nothing for {gateway.silent_s:.0f} s")
            else:
                self._grant(gateway)

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

    def close(self) -> None:
        """End all gateways and close their lanes; nothing is left."""
        if self._is_closed:
            return
        self._is_closed = True
        for gateway in self._gateways:
            for lane in gateway.lanes:
                lane.turn.close()
            if gateway.control is not None:
                with contextlib.suppress(OSError):  # it may be gone already
                    gateway.control.send("stop")
        deadline = time.monotonic() + STOP_S
        for gateway in self._gateways:
            if gateway.process is not None:
                try:
                    gateway.process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    logger.warning("Gateway %d did not end in time; it is killed.", gateway.id)
                self._end(gateway)
            for lane in gateway.lanes:
                lane.release()
            for fd in {gateway.bell_read_fd, gateway.bell_write_fd}:
                os.close(fd)

    # Processes.

    def _check(
        self, listen: Sequence[str], server_addresses: Sequence[str], num_gateways: int
    ) -> None:
        if num_gateways < 1:
            raise ValueError(f"num_gateways must be at least 1, got {num_gateways}.")
        for address in listen:
            self._security.check_listening(address)
            if num_gateways > 1 and Address.parse(address).path:
                raise ValueError(
                    f"Several gateways cannot share a unix socket, got {address}; listen at a "
                    "port, or use one gateway."
                )
        for address in server_addresses:
            self._security.check_dialing(address)

    def _new_gateway(self, id: int, listen: list[str], dial: list[str]) -> _Gateway:
        if hasattr(os, "eventfd"):
            read_fd = write_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        else:
            read_fd, write_fd = os.pipe()
            os.set_blocking(write_fd, False)
        return _Gateway(id, read_fd, write_fd, listen, dial)

    def _start(self, gateway: _Gateway) -> None:
        ours, theirs = socket.socketpair()
        if gateway.id > 0:
            gateway.listen = self._gateways[0].listen
        config = GatewayConfig(
            control_fd=theirs.fileno(),
            bell_fd=gateway.bell_read_fd,
            parent=os.getpid(),
            listen=gateway.listen,
            dial=gateway.dial,
            security=self._security.to_json(),
            limits=asdict(self._limits),
            share_port=self._share_port,
            knows_truncation=self._knows_truncation,
        )
        gateway.control = ControlSocket(ours)
        gateway.is_ready = False
        gateway.silent_s = 0.0
        gateway.started_at = time.monotonic()
        with theirs:
            fds = [theirs.fileno(), gateway.bell_read_fd]
            gateway.process = start_helper("libtorchbeast.rpc.gateway", config.to_json(), fds)

    def _wait_until_ready(self, gateway: _Gateway) -> None:
        assert gateway.process is not None
        deadline = time.monotonic() + START_S
        while not gateway.is_ready:
            self._wait_for_messages(WAIT_SLICE_S)
            self._hear(gateway)
            if not gateway.is_ready and gateway.process.poll() is not None:
                self._hear(gateway)  # its last words
                code = gateway.process.returncode
                raise RuntimeError(f"A gateway {describe_exit(code)} at its start.")
            if time.monotonic() > deadline:
                raise TimeoutError(f"A gateway did not start within {START_S:.0f} s.")

    def _mend(self, gateway: _Gateway, what: str) -> None:
        self._end(gateway)
        self.num_restarts += 1
        now = time.monotonic()
        soon = now - gateway.started_at < RESTART_PAUSE_S
        gateway.start_at = now + RESTART_PAUSE_S if soon else now
        logger.warning("Gateway %d %s; starting it anew.", gateway.id, what)
        if not soon:
            self._start(gateway)

    def _end(self, gateway: _Gateway) -> None:
        """Make sure that the process is gone; only then is its lanes' memory nobody's."""
        assert gateway.process is not None
        assert gateway.control is not None
        kill_group(gateway.process)
        gateway.process.wait(STOP_S)
        gateway.process = None
        gateway.control.close()
        gateway.control = None
        gateway.lent.clear()
        gateway.wishes.clear()
        gateway.num_streams = 0
        for lane in gateway.lanes:
            lane.turn.abandon()

    # What they say.

    def _wait_for_messages(self, timeout_s: float) -> None:
        poll = select.poll()
        for gateway in self._gateways:
            if gateway.control is not None:
                poll.register(gateway.control.fileno(), select.POLLIN)
        poll.poll(1000 * timeout_s)

    def _hear(self, gateway: _Gateway) -> None:
        assert gateway.control is not None
        try:
            gateway.control.flush()
            messages = gateway.control.receive()
        except (EOFError, OSError):
            return  # it has ended, or will in a moment
        if messages:
            gateway.silent_s = 0.0
        for message in messages:
            self._understand(gateway, message)

    def _understand(self, gateway: _Gateway, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "lane":
            self._hear_wish(gateway, message)
        elif kind == "streams":
            gateway.num_streams = message["number"]
        elif kind == "alive":
            pass
        elif kind == "ready":
            gateway.is_ready = True
            gateway.listen = message["addresses"]
        elif kind == "failed":
            if gateway.start_at == 0.0 and self.num_restarts == 0:
                raise OSError(message["text"])
            logger.error("Gateway %d: %s", gateway.id, message["text"])
        elif kind == "environment_failed" and self._on_environment_error is not None:
            self._on_environment_error(message["text"])
        elif kind == "environment_failed":
            logger.warning("An environment at %s raised:\n%s", message["peer"], message["text"])
        elif kind == "info":
            logger.info("%s", message["text"])
        else:
            logger.warning("%s (%s)", message["text"], message["peer"])

    # Lanes.

    def _hear_wish(self, gateway: _Gateway, wish: dict[str, Any]) -> None:
        """A lane is wished for; by the first environments, which say what all are to be like."""
        try:
            self._learn_spec(wish)
            gateway.wishes.append(wish)
        except Refused as refusal:
            self._reply(gateway, wish, refusal_of(refusal))

    def _learn_spec(self, wish: dict[str, Any]) -> None:
        spec = Spec.from_json(wish["spec"])
        if self.spec is None:
            if self._check_first is not None:
                self._check_first(spec, wish["num_actions"])
            self.spec = spec
        if self.num_actions is None and canonical(self.spec.action) == canonical(spec.action):
            self.num_actions = wish["num_actions"] or None

    def _grant(self, gateway: _Gateway) -> None:
        if self._add_lane is None:
            return
        while gateway.wishes:
            wish = gateway.wishes.pop(0)
            try:
                answer = self._answer(gateway, wish)
            except Refused as refusal:
                answer = refusal_of(refusal)
            except (OSError, RuntimeError, MemoryError) as error:  # no descriptor or thread is left
                logger.error("Environments are turned away, there is no lane for them: %s", error)
                text = "The learner cannot take more environments now; wait."
                answer = refusal_of(Refused("RESOURCE_EXHAUSTED", text))
            self._reply(gateway, wish, answer)

    def _reply(self, gateway: _Gateway, wish: dict[str, Any], answer: dict[str, Any]) -> None:
        assert gateway.control is not None
        with contextlib.suppress(OSError):  # it has died; the next poll mends it
            gateway.control.send(id=wish["id"], **answer)

    def _answer(self, gateway: _Gateway, wish: dict[str, Any]) -> dict[str, Any]:
        """A lane for a gateway that wishes one, or `Refused`."""
        check_fit(self.spec, self.num_actions, Spec.from_json(wish["spec"]), wish["num_actions"])
        lane = self._find_lane(gateway, wish["num_envs"])
        gateway.lent.add(lane)
        return {
            "kind": "lane",
            "fd": lane.fd,
            "spec": lane.spec.to_json(),
            "num_actions": self.num_actions,
            "num_envs": lane.num_envs,
        }

    def _find_lane(self, gateway: _Gateway, num_envs: int) -> Lane:
        """A lane that no stream has; a new one if need be."""
        self._forget_closed(gateway)
        unused = [lane for lane in gateway.lanes if lane not in gateway.lent]
        for lane in unused:
            if lane.num_envs == num_envs:
                return lane
        if len(gateway.lanes) >= self._limits.max_streams:
            close_free_lane(unused)
            self._forget_closed(gateway)
        if len(gateway.lanes) >= self._limits.max_streams:
            raise Refused(
                "RESOURCE_EXHAUSTED",
                f"The learner has {len(gateway.lanes)} lanes and makes no more.",
            )
        assert self.spec is not None
        assert self._add_lane is not None
        self._check_memory(self.spec, num_envs)
        lane = Lane.create(self.spec, num_envs)
        lane.bell_fd = gateway.bell_write_fd
        try:
            self._add_lane(lane)
        except BaseException:
            lane.close()
            raise
        gateway.lanes.append(lane)
        return lane

    def _check_memory(self, spec: Spec, num_envs: int) -> None:
        """Rollouts of all environments, one in the making and one on its way each, must fit."""
        others = sum(lane.num_envs for gateway in self._gateways for lane in gateway.lanes)
        num_bytes = 2 * (others + num_envs) * self._rows_per_rollout * row_bytes(spec)
        if num_bytes > MEMORY_SHARE * memory_bytes():
            raise Refused(
                "RESOURCE_EXHAUSTED",
                f"Rollouts of {num_envs} more environments would take the learner's memory: "
                f"{num_bytes >> 20} MiB in all of {memory_bytes() >> 20}.",
            )

    def _forget_closed(self, gateway: _Gateway) -> None:
        for lane in [lane for lane in gateway.lanes if lane.turn.state == CLOSED]:
            lane.release()
            gateway.lanes.remove(lane)
            gateway.lent.discard(lane)


def refusal_of(refused: Refused) -> dict[str, Any]:
    return {"kind": "refuse", "code": refused.code, "text": str(refused)}


def memory_bytes() -> int:
    """Of this machine, or of the container around us."""
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    allowed = [_number_in(path) for path in CONTAINER_MEMORY]
    return min([installed, *(number for number in allowed if number)])


def _number_in(path: Path) -> int:
    """0 if there is none."""
    try:
        text = path.read_text().strip()
    except OSError:
        return 0
    return int(text) if text.isdecimal() else 0
