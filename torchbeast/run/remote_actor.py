"""An actor that carries the model: steps environments with the learner's weights, sends rollouts.

    play        the loop: newest weights, T steps, one rollout
    build_copy  makes the learner's model from its description
    main        the process, `python -m torchbeast.run.remote_actor CONFIG`

Started and supervised by `torchbeast.polybeast_actor`. Environments run in a `Group`, as in any
other host, which handles those that raise, hang or send numbers that are not finite.
"""

import contextlib
import dataclasses
import json
import logging
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from libtorchbeast.env_host import FalseStart, HostConfig, is_false_start, run_and_exit
from libtorchbeast.episode_info import InfoSums, add_sums
from libtorchbeast.groups import Broken, Group
from libtorchbeast.helper_process import SupervisorLine
from libtorchbeast.log_repeats import RepeatFilter
from libtorchbeast.rows import Row, Unstacked
from libtorchbeast.rpc.actor_client import ActorLink, Session, SessionOver
from libtorchbeast.rpc.actor_messages import Welcome, size_of
from libtorchbeast.rpc.handshake import Hello
from libtorchbeast.rpc.rollout_messages import encode_rollout
from libtorchbeast.rpc.security import Security
from libtorchbeast.specs import ArraySpec
from libtorchbeast.tree import map_tree
from torchbeast.core.agent_output import as_output
from torchbeast.errors import UsageError
from torchbeast.models import build_distribution, build_model
from torchbeast.runtime.inference_model import prepare_to_act, tensors_of
from torchbeast.runtime.process_setup import seed_everything

logger = logging.getLogger("torchbeast")


@dataclass(frozen=True)
class ActorConfig:
    """The configuration of an actor process, passed to it as JSON."""

    host: dict[str, Any]
    """The HostConfig of its environments."""
    model: str | None
    autocast: bool
    weights_dtype: str

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class RolloutMemory:
    """Memory for the K rollouts that are being played, [T+1, K, ...]; reused for the next ones."""

    def __init__(self, welcome: Welcome, num_envs: int) -> None:
        T = welcome.unroll_length

        def zeros(num_rows: int) -> Callable[[ArraySpec], np.ndarray]:
            return lambda leaf: np.zeros((num_rows, num_envs, *leaf.shape), leaf.dtype)

        self.rows: Row = map_tree(zeros(T + 1), welcome.spec.row)
        self.output: dict[str, Any] = {
            "action": map_tree(zeros(T), welcome.spec.action),
            "policy_logits": np.zeros((T, num_envs, welcome.num_params), np.float32),
            "baseline": np.zeros((T, num_envs), np.float32),
        }

    def store(self, row: Row, t: int) -> dict[str, Any]:
        """Store a row at time t; returns it as the model's input, [1, K, ...]."""

        def put(memory: np.ndarray, value: Any) -> Tensor:
            if isinstance(value, Unstacked):
                for view, array in zip(memory[t], value.arrays, strict=True):
                    view[...] = array
            else:
                memory[t] = value
            return torch.from_numpy(memory[t : t + 1])

        return map_tree(put, self.rows, row)

    def store_output(self, output: dict[str, Any], t: int) -> Any:
        """Store the agent's output for the row at time t; returns the actions, [K, ...]."""

        def put(memory: np.ndarray, value: Tensor) -> np.ndarray:
            memory[t] = value[0].numpy()
            return memory[t]

        for name in ("policy_logits", "baseline"):
            put(self.output[name], output[name].float())
        return map_tree(put, self.output["action"], output["action"])


class Actor:
    """A group of environments and a copy of the model."""

    def __init__(
        self,
        group: Group,
        own_model: str | None = None,
        autocast: bool = False,
        beat: Callable[[], None] = lambda: None,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        """`beat` is called at each step, and `tick` a few times a second while it waits."""
        self._group = group
        self._own_model = own_model
        self._autocast = autocast
        self._beat = beat
        self._tick = tick
        self._repeats = RepeatFilter()
        self.num_unsent = 0
        """Rollouts that were too old to be sent, in total."""

    def run(self, link: ActorLink) -> None:
        """Play one session (a connection) after the other, until the link is stopped."""
        link.start()
        while True:
            try:
                session = link.next_session(self._tick)
            except SessionOver:
                return
            try:
                model = build_copy(session.welcome, self._own_model)
            except UsageError as error:
                session.refuse(str(error))
                self._wait_for_end(session)
                continue
            try:
                self.play(session, model)
            except SessionOver:
                continue
            except Broken:
                session.fail(traceback.format_exc())
                self._wait_for_end(session)
                raise

    def _wait_for_end(self, session: Session) -> None:
        with contextlib.suppress(SessionOver):
            session.wait_for(lambda: False, self._tick)

    @torch.inference_mode()
    def play(self, session: Session, model: nn.Module) -> None:
        """Play and send rollouts until `SessionOver`; an unfinished rollout is dropped."""
        welcome, num_envs = session.welcome, self._group.num_envs
        memory = RolloutMemory(welcome, num_envs)
        state = tuple(model.initial_state(batch_size=num_envs))  # type: ignore[operator]
        version, info, num_unsent, has_sent = -1, InfoSums(), 0, False
        row = self._group.start()
        while True:
            version = self._next_weights(session, model, version)
            state_at_start = tuple(map(_as_sent, state, welcome.state))
            for t in range(welcome.unroll_length):
                session.check()
                inputs = memory.store(row, t)
                with torch.autocast("cpu", torch.bfloat16, enabled=self._autocast):
                    output, state = model(inputs, state)
                row = self._group.step(memory.store_output(as_output(output), t))
                self._beat()
            memory.store(row, welcome.unroll_length)  # and again as row 0 of the next rollout
            add_sums(info, self._group.take_info())
            # The first is sent however old it is: a stream must begin with a first row.
            if has_sent and self._is_old(session, version):
                num_unsent += num_envs
                self._report_unsent(session, version)
                continue
            data = encode_rollout(
                memory.rows, memory.output, state_at_start, version, info, num_unsent
            )
            session.send_rollout(data)
            info, num_unsent, has_sent = InfoSums(), 0, True

    def _next_weights(self, session: Session, model: nn.Module, version: int) -> int:
        """Wait until the next rollout may begin, load the newest weights, return their version."""
        welcome = session.welcome

        def may_begin() -> bool:
            session.ask_for_weights()
            if session.weights is None:
                return False
            if session.num_untaken > welcome.rollouts_ahead:
                return False
            here = session.weights[0]
            if welcome.rollouts_ahead == 0 and here < session.version_at_taken:
                return False
            is_old = self._is_old(session, here)
            if is_old:
                self._report_late_weights(session, here)
            return not is_old

        session.wait_for(may_begin, self._tick)
        assert session.weights is not None
        newest, data = session.weights
        if newest != version:
            load_weights(model, welcome, data)
        return newest

    def _is_old(self, session: Session, version: int) -> bool:
        most = session.welcome.max_policy_lag
        return most is not None and session.newest - version > most

    def _report_late_weights(self, session: Session, version: int) -> None:
        text = self._repeats.take("Weights are too old when they arrive; see --max_policy_lag")
        if text is not None:
            logger.warning(
                "%s (%d): the learner is at version %d, those that arrived are version %d. Waiting "
                "for newer ones; if this lasts, raise the learner's --max_policy_lag.", text,
                session.welcome.max_policy_lag, session.newest, version,
            )  # fmt: skip

    def _report_unsent(self, session: Session, version: int) -> None:
        self.num_unsent += self._group.num_envs
        text = self._repeats.take("Rollouts are too old and are not sent; see --max_policy_lag")
        if text is not None:
            logger.warning(
                "%s (%d): the learner is at version %d, they were played with version %d. %d so "
                "far.", text, session.welcome.max_policy_lag, session.newest, version,
                self.num_unsent,
            )  # fmt: skip


def _as_sent(part: Tensor, spec: ArraySpec) -> np.ndarray:
    """A copy of a part of the agent's state, [L, K, ...], with the dtype that the learner uses."""
    return part.to(getattr(torch, spec.dtype), copy=True).numpy()


# ---------------------------------------------------------------------------- the copy of the model


def build_copy(welcome: Welcome, own_model: str | None = None) -> nn.Module:
    """Build the model that the learner describes; UsageError if that is not possible.

    `package.module:Class` is imported only if it is `own_model`, the --model of this actor.
    """
    name = welcome.model["name"]
    if own_model is not None and own_model != name:
        raise UsageError(
            f"The learner's model is {name}, and this actor's --model {own_model}; give the same "
            "at both ends."
        )
    if ":" in name and own_model is None:
        raise UsageError(
            f"The learner's model is {name}, code that this actor was not started with; give it "
            f"--model {name} if that is what you want to run."
        )
    flags = SimpleNamespace(**{**welcome.model, "model": name})
    model = prepare_to_act(build_model(flags, welcome.spec))
    _check_alike(model, welcome)
    num_params = build_distribution(flags, welcome.spec).num_params
    if num_params != welcome.num_params:
        raise UsageError(
            f"The learner's policy has {welcome.num_params} parameters, this actor's {num_params}; "
            "use the same version of the code at both ends."
        )
    return model


def _check_alike(model: nn.Module, welcome: Welcome) -> None:
    """UsageError if tensors or state differ: both ends may have different versions of a class."""
    names = [name for name, _ in [*model.named_parameters(), *model.named_buffers()]]
    ours = [(name, tuple(t.shape)) for name, t in zip(names, tensors_of(model), strict=True)]
    theirs = [(name, shape) for name, _, shape in welcome.tensors]
    if ours != theirs:
        ours_only = [t for t in ours if t not in theirs] or ours
        theirs_only = [t for t in theirs if t not in ours] or theirs
        raise UsageError(
            f"The learner's model has other tensors than this actor's: {theirs_only[0]} there, "
            f"{ours_only[0]} here; use the same version of the code at both ends."
        )
    state = model.initial_state(batch_size=1)  # type: ignore[operator]
    shapes = [(part.shape[0], *part.shape[2:]) for part in state]
    if shapes != [part.shape for part in welcome.state]:
        raise UsageError(
            f"The learner's model has a memory of {[list(p.shape) for p in welcome.state]}, this "
            f"actor's of {[list(shape) for shape in shapes]}; use the same code at both ends."
        )


@torch.no_grad()
def load_weights(model: nn.Module, welcome: Welcome, data: bytes) -> None:
    """Copy the weights in a received message to the model."""
    start = 0
    for ours, (_, dtype, shape) in zip(tensors_of(model), welcome.tensors, strict=True):
        end = start + size_of(dtype, shape)
        ours.copy_(_tensor(data[start:end], dtype).view(shape))
        start = end


def _tensor(data: bytes, dtype: str) -> Tensor:
    if dtype == "bfloat16":
        bits = np.frombuffer(data, "<u2").astype(np.int16)
        return torch.from_numpy(bits).view(torch.bfloat16)
    numbers = np.frombuffer(data, np.dtype(dtype).newbyteorder("<"))
    return torch.from_numpy(numbers.astype(dtype))  # a copy: the bytes are read-only


# -------------------------------------------------------------------------------------- the process


def run(config: ActorConfig, line: SupervisorLine) -> None:
    groups: list[Group] = []
    try:
        act(config, line, groups)
    except Exception as error:
        if not is_false_start(error, groups, num_groups=1):
            raise
        raise FalseStart from error


def act(config: ActorConfig, line: SupervisorLine, groups: list[Group]) -> None:
    """Make the environments and play until SIGTERM; adds the group to `groups` once it is made."""
    host = HostConfig(**config.host)
    seed_everything(host.seed)
    torch.set_num_threads(1)
    group = host.make_group(0, line.beat)
    groups.append(group)
    hello = Hello(host.name, group.num_envs, group.spec, has_model=True)
    security = Security.from_json(host.security)
    link = ActorLink(hello, host.address, security, config.weights_dtype)
    signal.signal(signal.SIGTERM, lambda *_: link.stop())
    try:
        Actor(group, config.model, config.autocast, line.beat, line.tick).run(link)
    finally:
        link.stop()
        link.join()
        group.close()


def main(text: str) -> None:
    values = json.loads(text)
    line = SupervisorLine(values.pop("line"))
    config = ActorConfig(**values)
    run_and_exit(lambda: run(config, line), line)


if __name__ == "__main__":
    main(sys.argv[1])
