"""MonoBeast: IMPALA on one machine, in pure Python and PyTorch. Read it from top to bottom.

    act    (many processes)  steps environments with the newest weights, fills rollouts
    learn  (threads)         takes batches of rollouts, updates the weights, publishes them
    train  (main thread)     starts both, hands out rollout memory, supervises the actors
    test                     plays with a trained agent

T is unroll_length, B a batch size, E envs_per_actor. Rollouts live in shared memory, cut into slots
of T+1 rows of one environment. Only the main process decides which actor may write which slot, and
says so over a separate pipe to each actor. So processes share no lock: an actor that is killed at
any instant leaves nothing locked, and its slots are given to another actor.
"""

import functools
import multiprocessing
import queue
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Annotated, Any, Literal, NamedTuple

import torch
import tyro
from torch import Tensor, nn

from libtorchbeast import output_log
from libtorchbeast.episode_info import InfoSums, add_sums
from libtorchbeast.groups import Group
from libtorchbeast.malloc import keep_freed_memory
from libtorchbeast.rows import Row, Spec
from libtorchbeast.seeding import derive_seed
from libtorchbeast.shared_memory import memory_bytes
from libtorchbeast.specs import ArraySpec
from libtorchbeast.supervisor import Child, Supervisor
from libtorchbeast.tree import map_tree
from torchbeast.core.learner import Learner
from torchbeast.core.losses import Batch
from torchbeast.envs import look_at, make_envs
from torchbeast.errors import UsageError, require_positive
from torchbeast.models import AgentState, as_output, build_distribution, build_model
from torchbeast.report import log_to_terminal
from torchbeast.run.batch_size import check_target, grow_batch, report_batch_size
from torchbeast.run.checkpoint import UPDATE_S
from torchbeast.run.command_line import run_command_line
from torchbeast.run.evaluate import evaluate
from torchbeast.run.flags import TrainingFlags, num_cores
from torchbeast.run.rank_flags import for_rank
from torchbeast.run.signals import StopRequest
from torchbeast.run.stall import Stall
from torchbeast.run.training import Run, build_learner, run_training
from torchbeast.runtime.distributed import attend_rounds, join_ranks
from torchbeast.runtime.inference_model import prepare_to_act
from torchbeast.runtime.monobeast_actors import ActorProcess, ParentPipe
from torchbeast.runtime.process_setup import own_device, seed_everything
from torchbeast.runtime.shared_tensors import (
    SharedTensors,
    TensorSpec,
    bytes_of,
    shared_zeros,
)
from torchbeast.runtime.shared_weights import SharedWeights
from torchbeast.runtime.threads import Threads, set_cpu_threads, watch

POLL_S = 0.2  # interval at which the main thread checks signals, learners and actors
JOIN_S = 10.0  # how long to wait for actors that were asked to end
SLOTS_AHEAD = 2  # sets of E slots an actor holds: the one it fills, and the next


@dataclass(frozen=True)
class Flags(TrainingFlags):
    """Train or test an agent with MonoBeast."""

    num_actors: int = max(2, num_cores())
    """Actors: processes with a group of environments and a copy of the model."""
    envs_per_actor: int = 8
    """E: environments in each actor, which step together, with one forward pass."""
    num_buffers: int | None = None
    """Rollouts that fit the shared memory, if more than are needed; None: those needed."""
    num_learner_threads: Annotated[int, tyro.conf.arg(aliases=["--num_threads"])] = 2
    """Threads that prepare batches and learn in turn."""
    start_method: Literal["forkserver", "spawn", "fork"] = "forkserver"
    """How actor processes are started, as in Python's multiprocessing."""
    actor_timeout_s: float = 120.0
    """Seconds without a step after which an actor is killed and restarted."""

    @property
    def num_envs(self) -> int:
        return self.num_actors * self.envs_per_actor

    @property
    def effective_batch_size(self) -> int:
        """batch_size, or more if --target_policy_lag needs it; proof in docs/architecture.md."""
        ahead = (SLOTS_AHEAD + 1) * self.num_envs - self.envs_per_actor - 1
        room = (self.num_buffers or 0) - SLOTS_AHEAD * self.num_envs
        return grow_batch(self, self.num_envs, ahead, room)

    @property
    def num_slots(self) -> int:
        """Rollouts that fit the shared memory: enough to keep actors and learner busy."""
        return max(SLOTS_AHEAD * self.num_envs + self.effective_batch_size, self.num_buffers or 0)

    @property
    def num_in_flight(self) -> int:
        """Slots in use while no actor is late: all, or with --hold_actors enough for a batch."""
        if not self.hold_actors:
            return self.num_slots
        return max(self.num_envs, self.effective_batch_size + self.envs_per_actor - 1)

    def place_environments(self) -> dict[str, Any]:
        if not self.hold_actors:
            return {}
        if self.is_given("num_actors"):  # one for each rollout of a batch: no lag
            return {"envs_per_actor": max(1, self.batch_size // max(1, self.num_actors))}
        return {"num_actors": max(1, self.batch_size // self.envs_per_actor)}

    @property
    def learner_device(self) -> torch.device:
        return own_device(use_cuda=not self.disable_cuda)

    def validate(self) -> None:
        super().validate()
        names = ("num_actors", "envs_per_actor", "num_learner_threads", "actor_timeout_s")
        require_positive(self, *names)
        check_target(self)
        if self.num_buffers is not None and self.num_buffers <= self.num_actors:
            raise UsageError(
                f"num_buffers must exceed num_actors, got {self.num_buffers} <= {self.num_actors}; "
                "raise --num_buffers or leave it out."
            )


# ----------------------------------------------------------------------------------- shared memory


class Filled(NamedTuple):
    """A slot that holds a complete rollout."""

    slot: int
    version: int  # of the weights that acted
    source: int  # actor * envs_per_actor + environment


class RolloutMemory:
    """Memory for `num_slots` rollouts; each field is a tensor [num_slots, T+1, ...].

    The agent's output has T rows: its output for the last row is that for row 0 of the next
    rollout, which is computed with newer weights.
    """

    def __init__(self, flags: Flags, spec: Spec, model: nn.Module) -> None:
        S, T = flags.num_slots, flags.unroll_length
        num_params = build_distribution(flags, spec).num_params

        def shared(rows: int, shape: tuple[int, ...], dtype: torch.dtype) -> TensorSpec:
            return TensorSpec((S, rows, *shape), dtype)

        def of_rows(array: ArraySpec) -> TensorSpec:
            return shared(T + 1, array.shape, getattr(torch, array.dtype))

        specs = {
            "rows": map_tree(of_rows, spec.row),
            "action": map_tree(lambda a: shared(T, a.shape, getattr(torch, a.dtype)), spec.action),
            "policy_logits": shared(T, (num_params,), torch.float32),
            # For each part [L, B, ...] of the agent's state: [num_slots, L, ...].
            "states": tuple(
                shared(s.shape[0], s.shape[2:], s.dtype) for s in initial_state(model, 1)
            ),
        }
        if bytes_of(specs) > memory_bytes():
            raise UsageError(
                f"{S} rollouts take {bytes_of(specs) >> 20} MiB, and this machine has "
                f"{memory_bytes() >> 20}; lower --num_actors, --envs_per_actor, --unroll_length or "
                "--num_buffers."
            )
        self._memory = SharedTensors(specs)

    def __getattr__(self, name: str) -> Any:
        """`rows`, `action`, `policy_logits`, `states`; only the memory is sent to actors."""
        if name.startswith("_"):
            raise AttributeError(name)
        return self._memory.tensors[name]

    def store(self, row: Row, slots: Tensor, t: int) -> None:
        """Write a row of the E environments to time t of their slots."""

        def put(shared: Tensor, value: Any) -> None:
            shared[slots, t] = torch.from_numpy(value)

        map_tree(put, self.rows, row)

    def store_output(self, action: Any, policy_logits: Tensor, slots: Tensor, t: int) -> None:
        """Write the agent's output for the row at time t."""

        def put(shared: Tensor, value: Tensor) -> None:
            shared[slots, t] = value.to(shared.dtype)  # integers may have any dtype

        map_tree(put, self.action, action)
        put(self.policy_logits, policy_logits)

    def collect(self, filled: list[Filled], device: torch.device) -> tuple[Batch, AgentState]:
        """Copy these slots to a batch [T+1, B, ...] on the device."""
        slots = torch.tensor([f.slot for f in filled])
        pin_memory = device.type == "cuda"

        def batch_of(field: Tensor) -> Tensor:  # [num_slots, T+1, ...] -> [T+1, B, ...]
            shape = (field.shape[1], len(slots), *field.shape[2:])
            out = torch.empty(shape, dtype=field.dtype, pin_memory=pin_memory)
            torch.index_select(field.transpose(0, 1), 1, slots, out=out)
            return out.to(device, non_blocking=True)

        batch = map_tree(batch_of, self.rows)
        batch["action"] = map_tree(batch_of, self.action)
        batch["policy_logits"] = batch_of(self.policy_logits)
        batch["version"] = torch.tensor([f.version for f in filled], device=device)
        batch["source"] = torch.tensor([f.source for f in filled], device=device)
        return batch, tuple(batch_of(state) for state in self.states)


class Shared(NamedTuple):
    """The memory that the actors and the main process share."""

    rollouts: RolloutMemory
    weights: SharedWeights
    num_steps: SharedTensors  # [num_actors]: steps taken so far, an actor's heartbeat


# --------------------------------------------------------------------------------------------- act


def act(pipe: ParentPipe, actor_id: int, seed: int, flags: Flags, shared: Shared) -> None:
    """The actor process: make environments, then fill rollouts until the main process ends."""
    seed_everything(seed)
    keep_freed_memory()
    torch.set_num_threads(1)
    envs = make_group(flags, flags.envs_per_actor, seed)
    try:
        fill_rollouts(pipe, actor_id, flags, envs, shared)
    finally:
        envs.close()


@torch.inference_mode()
def fill_rollouts(
    pipe: ParentPipe, actor_id: int, flags: Flags, envs: Group, shared: Shared
) -> None:
    """For each list of E slots from the pipe: fill them with rollouts, and send the list back."""
    rollouts = shared.rollouts
    row = envs.start()
    model = prepare_to_act(build_model(flags, envs.spec))
    state = initial_state(model, flags.envs_per_actor)
    version = -1
    while True:
        slots = pipe.recv()
        index = torch.tensor(slots)
        version = shared.weights.fetch(model, have=version)
        for memory, part in zip(rollouts.states, state, strict=True):
            memory[index] = part.transpose(0, 1)  # as it is before row 0
        for t in range(flags.unroll_length):
            rollouts.store(row, index, t)
            inputs = map_tree(lambda x: torch.from_numpy(x).unsqueeze(0), row)  # [T=1, E, ...]
            output, state = model(inputs, state)
            output = as_output(output)
            action = map_tree(lambda x: x[0], output["action"])
            rollouts.store_output(action, output["policy_logits"][0], index, t)
            row = envs.step(map_tree(lambda x: x.numpy(), action))
            shared.num_steps.tensors[actor_id] += 1
        rollouts.store(row, index, flags.unroll_length)  # and again as row 0 of the next rollout
        pipe.send((slots, version, envs.take_info()))


# ---------------------------------------------------------- the actors, seen from the main process


class Actors:
    """Hands out slots and takes in filled ones, while a supervisor keeps the actors alive.

    All methods but `release` are for the main thread.
    """

    def __init__(self, flags: Flags, shared: Shared, seed: int) -> None:
        self._flags = flags
        self._shared = shared
        self._seed = seed
        self._context: Any = multiprocessing.get_context(flags.start_method)
        if flags.start_method == "forkserver":
            self._context.set_forkserver_preload(["torchbeast.run.training"])  # nearly all
        self._lock = threading.Lock()  # guards the following
        self._free = deque(range(flags.num_slots))
        self._held: list[deque[list[int]]] = [deque() for _ in range(flags.num_actors)]
        self._processes: dict[int, ActorProcess] = {}
        children = [self._make_child(actor_id) for actor_id in range(flags.num_actors)]
        output = output_log.OutputLog(flags.rundir / output_log.FILE_NAME)
        self.supervisor = Supervisor(
            children, flags.actor_timeout_s, "--actor_timeout_s", keep_output=output.keep
        )
        self._supervise_at = 0.0
        self._info: InfoSums = {}

    def poll(self) -> list[Filled]:
        """The rollouts filled since the last call; waits up to POLL_S if there are none."""
        if time.monotonic() >= self._supervise_at:
            self.supervisor.poll()
            self._supervise_at = time.monotonic() + POLL_S
            self._hand_out()
        filled: list[Filled] = []
        actor_of: dict[Any, int] = {process.pipe: i for i, process in self._processes.items()}
        pipes: list[Any] = wait(actor_of, timeout=POLL_S)
        for pipe in pipes:
            try:
                slots, version, info = pipe.recv()
            except (EOFError, OSError):  # it died: the supervisor will notice
                self._supervise_at = 0.0
                time.sleep(0.01)
                continue
            add_sums(self._info, info)
            actor = actor_of[pipe]
            with self._lock:
                held = self._held[actor].popleft()
            assert held == slots, (held, slots)
            first = actor * self._flags.envs_per_actor
            filled += [Filled(slot, version, first + i) for i, slot in enumerate(slots)]
            self._hand_out()
        return filled

    def release(self, filled: list[Filled]) -> None:
        """Free the slots of rollouts that have been read. For any thread."""
        with self._lock:
            self._free.extend(f.slot for f in filled)
        self._hand_out()

    def take_info(self) -> InfoSums:
        """Sums of the numbers in `info`, over the episodes that ended since the last call."""
        info, self._info = self._info, {}
        return info

    def name_source(self, source: int) -> str:
        """The environment with this `source` number, in words."""
        actor, environment = divmod(source, self._flags.envs_per_actor)
        return f"environment {environment} of actor {actor}"

    def close(self) -> None:
        """End all actors: SIGTERM, wait, then SIGKILL."""

        def ask() -> None:
            for process in self._processes.values():
                process.terminate()

        self.supervisor.close(ask, JOIN_S)

    def _make_child(self, i: int) -> Child:
        """Actor i, described for the supervisor."""
        num_waits = 0

        def heartbeat() -> int:
            nonlocal num_waits
            num_waits += not self._held[i]  # no slots: it waits, and does not hang
            return num_steps() + num_waits

        def num_steps() -> int:
            return int(self._shared.num_steps.tensors[i])

        def start(num_starts: int) -> ActorProcess:
            # A new seed at each start: the same episodes might crash it again.
            args = (i, derive_seed(self._seed, i, num_starts), self._flags, self._shared)
            process = ActorProcess(self._context, f"actor-{i}", act, args, heartbeat)
            with self._lock:
                self._processes[i] = process
            return process

        def on_end() -> None:
            with self._lock:
                self._processes.pop(i).close()
                while self._held[i]:
                    self._free.extend(self._held[i].popleft())

        return Child(f"Actor {i}", start, on_end, num_steps)

    def _hand_out(self) -> None:
        """Give free slots to the actors that hold fewest; spare ones only if an actor is late."""
        flags = self._flags
        spare = 0 if self.supervisor.has_late else flags.num_slots - flags.num_in_flight
        with self._lock:
            while self._processes and len(self._free) - spare >= flags.envs_per_actor:
                i = min(self._processes, key=lambda i: len(self._held[i]))
                if len(self._held[i]) >= SLOTS_AHEAD:
                    return
                slots = [self._free.popleft() for _ in range(flags.envs_per_actor)]
                self._held[i].append(slots)
                with suppress(OSError):  # it died: `on_end` will take them back
                    self._processes[i].pipe.send(slots)


# ------------------------------------------------------------------------------------------- learn

Batches = queue.SimpleQueue[list[Filled] | None]  # B filled slots each; None ends a thread


def learn(flags: Flags, learner: Learner, shared: Shared, actors: Actors, batches: Batches) -> None:
    """Turn filled slots into updates. One thread copies a batch while another learns."""
    set_cpu_threads(flags.learner_cpu_threads)
    torch.set_flush_denormal(True)
    with attend_rounds(learner, shared.weights.publish):
        for filled in watch("learner", iter(batches.get, None), learner.stats):
            batch, state = shared.rollouts.collect(filled, learner.device)
            if not flags.hold_actors:
                actors.release(filled)
            if not learner.update(batch, state, shared.weights.publish):
                return
            learner.stats.observe({"batch_size": len(filled)})
            if flags.hold_actors:
                actors.release(filled)


# ---------------------------------------------------------------------------------- train and test


def train(flags: Flags, stop: StopRequest | None = None) -> int:
    """Train until `total_steps`, or until a signal asks to stop. Returns the exit code."""
    keep_freed_memory()
    with stop or StopRequest() as stop, join_ranks(stop, flags.learner_device) as ranks:
        flags = for_rank(flags, ranks)
        seed_everything(flags.seed)
        spec = look_at(flags.env_options, flags.envs_per_actor)
        learner = build_learner(flags, spec, flags.learner_device, ranks)
        shared = Shared(
            RolloutMemory(flags, spec, learner.model),
            SharedWeights(learner.model),
            shared_zeros((flags.num_actors,), torch.int64),
        )
        return run_training(
            flags, learner, lambda run: act_and_learn(flags, learner, shared, run), stop, spec
        )


def act_and_learn(flags: Flags, learner: Learner, shared: Shared, run: Run) -> None:
    """The main thread's loop. When it returns, all actors and learner threads have ended."""
    shared.weights.publish(learner.model, learner.version)
    # After a resume the actors must not repeat the same episodes.
    actors = Actors(flags, shared, derive_seed(flags.seed, learner.version))
    learner.name_source = actors.name_source
    batches: Batches = queue.SimpleQueue()
    run_learner = functools.partial(learn, flags, learner, shared, actors, batches)
    report_batch_size(flags, flags.effective_batch_size, flags.num_envs)
    threads = Threads("learner", flags.num_learner_threads, run_learner, learner.finished)
    filled: list[Filled] = []  # in the order in which they were filled
    stall = Stall(
        learner.stats, actors.supervisor.late,
        lambda: int(shared.num_steps.tensors.sum()) * flags.envs_per_actor,
        lambda: (len(filled), flags.effective_batch_size), who="actors",
    )  # fmt: skip
    try:
        while not learner.finished.is_set() and not run.stop_requested:
            filled += actors.poll()
            learner.stats.add_info(flags.choose_info(actors.take_info()))
            while len(filled) >= flags.effective_batch_size:
                batches.put(filled[: flags.effective_batch_size])
                del filled[: flags.effective_batch_size]
            run.tick(stall)
    finally:
        learner.finished.set()
        for _ in range(flags.num_learner_threads):
            batches.put(None)
        try:
            threads.join(UPDATE_S)  # the last update ends before the last checkpoint
        finally:
            actors.close()


def make_group(flags: TrainingFlags, num_envs: int, seed: int) -> Group:
    """Environments that step together; one that raises is rebuilt while the others go on."""
    return Group(lambda seed: make_envs(flags.env_options, num_envs, seed), seed)


def initial_state(model: nn.Module, batch_size: int) -> AgentState:
    """The agent's state at the start of an episode: tensors [L, B, ...], or () without memory."""
    return model.initial_state(batch_size=batch_size)  # type: ignore[operator]


def test(flags: Flags) -> int:
    """Play episodes with a checkpoint of the run. Returns the exit code."""
    evaluate(flags)
    return 0


def main(flags: Flags) -> int:
    log_to_terminal()
    return train(flags) if flags.mode == "train" else test(flags)


if __name__ == "__main__":
    sys.exit(run_command_line(Flags, main))
