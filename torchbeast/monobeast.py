"""MonoBeast: IMPALA on one machine, in pure Python and PyTorch. Read it from top to bottom.

    act    (many processes)  steps environments with the newest weights, fills rollouts
    learn  (threads)         takes batches of rollouts, updates the weights, publishes them
    train  (main thread)     starts both, hands out rollout memory, watches over the actors
    test                     plays with a trained agent

T is unroll_length, B batch_size, E envs_per_actor. Rollouts live in shared memory, cut into slots
of T+1 rows of one environment. The main process alone says who may write which slot; it tells each
actor over a pipe of the actor's own, so that no lock is shared and an actor that is killed at any
instant leaves nothing locked: its slots are simply given to another.
"""

import dataclasses
import logging
import multiprocessing as mp
import queue
import sys
import threading
import time
import traceback
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Annotated, Any, Literal, NamedTuple

import torch
import tyro
from torch import Tensor, nn

from torchbeast.core.evaluate import evaluate
from torchbeast.core.file_writer import new_xpid
from torchbeast.core.flags import TrainingFlags, num_cores, run_command_line
from torchbeast.core.learner import Batch, Learner
from torchbeast.core.memory import keep_freed_memory
from torchbeast.core.processes import ParentGone, ParentPipe, describe_death, set_up_child
from torchbeast.core.seeding import SEED_LIMIT, seed_everything
from torchbeast.core.signals import StopRequest
from torchbeast.core.threads import Threads, set_cpu_threads
from torchbeast.core.tree import map_tree
from torchbeast.core.weights import SharedWeights
from torchbeast.envs import Environments, Row, make_envs
from torchbeast.errors import UsageError
from torchbeast.models import AgentState, as_output, make_model
from torchbeast.report import log_to_terminal
from torchbeast.training import UPDATE_S, Run, run_training

Filled = tuple[int, int]  # a slot with a whole rollout in it, and the version that acted

logger = logging.getLogger("torchbeast")

POLL_S = 0.2  # how soon the main thread sees a signal, a finished learner, a silent actor
MAX_GAP_S = 10 * POLL_S  # more time between two looks at the actors is no sign of their hanging
JOIN_S = 10.0  # how long to wait for a process that was told to end
ROLLOUTS_AHEAD = 2  # slots an actor holds: those it fills and the next
MAX_FAILURES = 5  # times in a row that an actor may fail before it is given up


@dataclass(frozen=True)
class Flags(TrainingFlags):
    """Train or test an agent with MonoBeast."""

    num_actors: int = max(2, num_cores())
    """Processes that step environments."""
    envs_per_actor: int = 8
    """E: environments an actor steps with one forward pass."""
    num_buffers: int | None = None
    """Rollouts that fit the shared memory, if that is more than are needed anyway."""
    num_learner_threads: Annotated[int, tyro.conf.arg(aliases=["--num-threads"])] = 2
    """Threads that prepare batches and learn in turn."""
    start_method: Literal["forkserver", "spawn", "fork"] = "forkserver"
    """How actors are started."""
    actor_timeout_s: float = 120.0
    """An actor that takes no step for so long is killed and started anew."""

    @property
    def num_slots(self) -> int:
        """Rollouts that fit the shared memory: never too few to keep everybody busy."""
        wanted = ROLLOUTS_AHEAD * self.num_actors * self.envs_per_actor + self.batch_size
        return max(wanted, self.num_buffers or 0)

    @property
    def learner_device(self) -> torch.device:
        use_cuda = torch.cuda.is_available() and not self.disable_cuda
        return torch.device("cuda" if use_cuda else "cpu")

    def validate(self) -> None:
        super().validate()
        names = ("num_actors", "envs_per_actor", "num_learner_threads", "actor_timeout_s")
        self.require_positive(*names)
        if self.num_buffers is not None and self.num_buffers <= self.num_actors:
            raise UsageError(
                f"num_buffers must exceed num_actors, got {self.num_buffers} <= {self.num_actors}; "
                "raise --num_buffers or leave it out."
            )


# ----------------------------------------------------------------------------------- shared memory


class Rollouts:
    """Memory for `num_slots` rollouts; each field is a tensor [num_slots, T+1, ...].

    Of the agent's output there are T rows: what it says at the last row is said at the first row
    of the next rollout, with newer weights.
    """

    def __init__(self, flags: Flags, row: Row, model: nn.Module, num_actions: int) -> None:
        S, T = flags.num_slots, flags.unroll_length

        def shared(rows: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.zeros(S, rows, *shape, dtype=dtype).share_memory_()

        self.rows = map_tree(lambda x: shared(T + 1, x.shape[1:], torch.from_numpy(x).dtype), row)
        self.action = shared(T, (), torch.int64)
        self.policy_logits = shared(T, (num_actions,), torch.float32)
        self.states = tuple(  # of each part [L, B, ...] of the agent's memory: [num_slots, L, ...]
            shared(s.shape[0], s.shape[2:], s.dtype) for s in initial_state(model, 1)
        )

    def store(self, row: Row, slots: Tensor, t: int) -> None:
        """Write the E environments' row to time t of their slots."""

        def put(shared: Tensor, value: Any) -> None:
            shared[slots, t] = torch.from_numpy(value)

        map_tree(put, self.rows, row)

    def collect(self, filled: list[Filled], device: torch.device) -> tuple[Batch, AgentState]:
        """Copy these slots to a batch [T+1, B, ...] on the device."""
        slots = torch.tensor([slot for slot, _ in filled])
        pin_memory = device.type == "cuda"

        def batch_of(field: Tensor) -> Tensor:  # [num_slots, T+1, ...] -> [T+1, B, ...]
            shape = (field.shape[1], len(slots), *field.shape[2:])
            out = torch.empty(shape, dtype=field.dtype, pin_memory=pin_memory)
            torch.index_select(field.transpose(0, 1), 1, slots, out=out)
            return out.to(device, non_blocking=True)

        batch = map_tree(batch_of, self.rows)
        batch["action"] = batch_of(self.action)
        batch["policy_logits"] = batch_of(self.policy_logits)
        batch["version"] = torch.tensor([version for _, version in filled], device=device)
        return batch, tuple(batch_of(state) for state in self.states)


class Shared(NamedTuple):
    """All that the actors and the main process have in common."""

    rollouts: Rollouts
    weights: SharedWeights
    num_moves: Tensor  # [num_actors], counted up by each actor as a sign of life


# --------------------------------------------------------------------------------------------- act


def act(actor_id: int, seed: int, flags: Flags, shared: Shared, connection: Connection) -> None:
    """An actor's whole life: set up, then fill rollouts until the main process says or dies."""
    set_up_child()
    seed_everything(seed)
    keep_freed_memory()
    torch.set_num_threads(1)
    pipe = ParentPipe(connection)
    try:
        envs = make_envs(flags.env_options, flags.envs_per_actor, seed)
        try:
            fill_rollouts(actor_id, flags, envs, shared, pipe)
        finally:
            envs.close()
    except ParentGone:
        pass
    except Exception:
        pipe.send(traceback.format_exc())
        sys.exit(1)


@torch.inference_mode()
def fill_rollouts(
    actor_id: int, flags: Flags, envs: Environments, shared: Shared, pipe: ParentPipe
) -> None:
    """For each list of slots that comes over the pipe, fill them with a rollout and say so."""
    rollouts = shared.rollouts
    row = envs.reset()
    model = build_model(flags, row, envs.num_actions)
    state = initial_state(model, flags.envs_per_actor)
    version = -1
    while True:
        slots = pipe.recv()
        index = torch.tensor(slots)
        version = shared.weights.fetch(model, have=version)
        for memory, part in zip(rollouts.states, state, strict=True):
            memory[index] = part.transpose(0, 1)  # as it is before the agent sees row 0
        for t in range(flags.unroll_length):
            rollouts.store(row, index, t)
            inputs = map_tree(lambda x: torch.from_numpy(x).unsqueeze(0), row)  # [T=1, E, ...]
            output, state = model(inputs, state)
            output = as_output(output)
            rollouts.action[index, t] = output["action"][0]
            rollouts.policy_logits[index, t] = output["policy_logits"][0]
            row = envs.step(output["action"][0].numpy())
            shared.num_moves[actor_id] += 1
        rollouts.store(row, index, flags.unroll_length)  # and again as row 0 of the next rollout
        pipe.send((slots, version))


# ---------------------------------------------------------- the actors, seen from the main process


@dataclass
class Actor:
    """One actor: its process and pipe, the slots it holds, and for how long it has not moved."""

    id: int
    process: Any = None  # None: given up
    pipe: Any = None
    held: deque[list[int]] = field(default_factory=deque)
    num_starts: int = 0
    num_failures: int = 0  # in a row
    num_moves: int = 0
    idle_s: float = 0.0


class Actors:
    """Starts the actors, hands out slots, mends what breaks. For the main thread but `release`."""

    def __init__(self, flags: Flags, shared: Shared, first_seed: int) -> None:
        self._flags = flags
        self._shared = shared
        self._first_seed = first_seed
        self._context: Any = mp.get_context(flags.start_method)
        if flags.start_method == "forkserver":
            self._context.set_forkserver_preload(["torchbeast.report"])  # torch, once for all
        self._lock = threading.Lock()  # of the free slots and who holds which
        self._free = deque(range(flags.num_slots))
        self._checked_at = time.monotonic()
        self._actors = [Actor(i) for i in range(flags.num_actors)]
        try:
            for actor in self._actors:
                self._start(actor)
        except BaseException:  # there is no room for one more: those before must end
            self.close()
            raise

    def poll(self) -> list[Filled]:
        """The rollouts that were filled; waits a little if there are none."""
        filled: list[Filled] = []
        by_pipe: dict[Any, Actor] = {a.pipe: a for a in self._actors if a.process is not None}
        for pipe in wait(by_pipe, timeout=POLL_S):
            actor = by_pipe[pipe]
            try:
                message = actor.pipe.recv()
            except (EOFError, OSError):
                self._mend(actor, describe_death(actor.process, JOIN_S))
                continue
            if isinstance(message, str):
                self._mend(actor, f"raised an exception:\n{message}")
                continue
            slots, version = message
            filled += [(slot, version) for slot in slots]
            actor.num_failures = 0
            with self._lock:
                held = actor.held.popleft()
            assert held == slots, (held, slots)
            self._hand_out()
        self._check_moves()
        return filled

    def release(self, filled: list[Filled]) -> None:
        """These have been read: their slots may be written again. For any thread."""
        with self._lock:
            self._free.extend(slot for slot, _ in filled)
        self._hand_out()

    def close(self) -> None:
        """End all actors: ask, wait, then kill."""
        running = [actor for actor in self._actors if actor.process is not None]
        for actor in running:
            actor.process.terminate()
        deadline = time.monotonic() + JOIN_S
        for actor in running:
            actor.process.join(max(0.0, deadline - time.monotonic()))
            self._end(actor)

    def _start(self, actor: Actor) -> None:
        # A restarted actor gets new seeds, or it would live through the same bad luck again.
        number = actor.id + self._flags.num_actors * actor.num_starts
        seed = self._first_seed + number * self._flags.envs_per_actor
        actor.num_starts += 1
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=act,
            name=f"actor-{actor.id}",
            args=(actor.id, seed % SEED_LIMIT, self._flags, self._shared, theirs),
        )
        process.start()
        theirs.close()  # from now on, the actor's death closes the pipe
        actor.process, actor.pipe = process, ours
        actor.idle_s = 0.0
        self._hand_out()

    def _hand_out(self) -> None:
        """Give free slots to the actors that hold fewest."""
        with self._lock:
            able = [actor for actor in self._actors if actor.pipe is not None]
            while able and len(self._free) >= self._flags.envs_per_actor:
                actor = min(able, key=lambda a: len(a.held))
                if len(actor.held) >= ROLLOUTS_AHEAD:
                    return
                slots = [self._free.popleft() for _ in range(self._flags.envs_per_actor)]
                actor.held.append(slots)
                with suppress(OSError):  # it died: `poll` will find out and take the slots back
                    actor.pipe.send(slots)

    def _mend(self, actor: Actor, what: str) -> None:
        """Tell what happened to an actor and start it anew, unless it never works."""
        self._end(actor)
        actor.num_failures += 1
        if actor.num_failures < MAX_FAILURES:
            logger.warning("Actor %d %s; starting it anew.", actor.id, what)
            self._start(actor)
            return
        logger.error("Actor %d %s; giving it up after %d tries.", actor.id, what, MAX_FAILURES)
        if all(a.process is None for a in self._actors):
            raise RuntimeError(f"No actor is left to train with; the last one {what}")

    def _end(self, actor: Actor) -> None:
        """Make sure that the process is gone, then take its slots back."""
        actor.process.kill()
        actor.process.join(JOIN_S)
        assert not actor.process.is_alive(), f"actor {actor.id} survived SIGKILL"
        with self._lock:
            actor.pipe.close()
            actor.process = actor.pipe = None
            while actor.held:
                self._free.extend(actor.held.popleft())

    def _check_moves(self) -> None:
        """An actor that has work and does not move hangs in its environment."""
        now = time.monotonic()
        # While this process was stopped (Ctrl-Z, a sleeping laptop), so were the actors.
        passed_s, self._checked_at = min(now - self._checked_at, MAX_GAP_S), now
        for actor in self._actors:
            num_moves = int(self._shared.num_moves[actor.id])
            actor.idle_s += passed_s
            if num_moves != actor.num_moves or not actor.held:
                actor.num_moves, actor.idle_s = num_moves, 0.0
            elif actor.idle_s > self._flags.actor_timeout_s:
                self._mend(actor, f"took no step for {actor.idle_s:.0f} s")


# ------------------------------------------------------------------------------------------- learn


class LearnerThreads:
    """Threads that turn filled slots into updates: one copies a batch while another learns."""

    def __init__(self, flags: Flags, learner: Learner, shared: Shared, actors: Actors) -> None:
        self._flags = flags
        self._learner = learner
        self._shared = shared
        self._actors = actors
        self._filled: list[Filled] = []
        self._batches: queue.SimpleQueue[list[Filled] | None] = queue.SimpleQueue()
        self.finished = threading.Event()
        self._threads = Threads("learner", flags.num_learner_threads, self._run, self.finished)

    def put(self, filled: list[Filled]) -> None:
        """Pass filled slots on, B at a time, in the order in which they were filled."""
        B = self._flags.batch_size
        self._filled += filled
        while len(self._filled) >= B:
            self._batches.put(self._filled[:B])
            del self._filled[:B]

    def close(self) -> None:
        """End the threads, and raise here what went wrong there."""
        self.finished.set()
        for _ in range(self._flags.num_learner_threads):
            self._batches.put(None)
        self._threads.join(UPDATE_S)  # the last checkpoint must hold the last update whole

    def _run(self) -> None:
        set_cpu_threads(self._flags.learner_cpu_threads)
        torch.set_flush_denormal(True)
        while (filled := self._batches.get()) is not None and not self.finished.is_set():
            self._learn(filled)

    def _learn(self, filled: list[Filled]) -> None:
        batch, state = self._shared.rollouts.collect(filled, self._learner.device)
        self._actors.release(filled)
        with self._learner.lock:
            if self.finished.is_set():
                return
            self._learner.step(batch, state)
            self._shared.weights.publish(self._learner.model, self._learner.version)
            if self._learner.stats.step >= self._flags.total_steps:
                self.finished.set()


# ---------------------------------------------------------------------------------- train and test


def train(flags: Flags) -> int:
    """Train until `total_steps`, or until told to stop. Returns the exit code."""
    flags = dataclasses.replace(flags, xpid=flags.xpid or new_xpid())
    keep_freed_memory()
    seed_everything(flags.seed)
    with StopRequest() as stop:
        envs = make_envs(flags.env_options, num_envs=1, seed=flags.seed)
        row, num_actions = envs.reset(), envs.num_actions
        envs.close()
        learner = Learner(build_model(flags, row, num_actions), flags, flags.learner_device)
        shared = Shared(
            Rollouts(flags, row, learner.model, num_actions),
            SharedWeights(learner.model),
            torch.zeros(flags.num_actors, dtype=torch.int64).share_memory_(),
        )
        return run_training(
            flags, learner, lambda run: act_and_learn(flags, learner, shared, run), stop
        )


def act_and_learn(flags: Flags, learner: Learner, shared: Shared, run: Run) -> None:
    """The main thread's loop. At its end no actor and no learner thread is left."""
    shared.weights.publish(learner.model, learner.version)
    # After a resume the actors must not live through the same episodes again.
    actors = Actors(flags, shared, first_seed=flags.seed + 1_000_003 * learner.version)
    try:
        learners = LearnerThreads(flags, learner, shared, actors)
        try:
            while not learners.finished.is_set() and not run.told_to_stop:
                learners.put(actors.poll())
                run.tick()
        finally:
            learners.close()
    finally:
        actors.close()


def build_model(flags: TrainingFlags, row: Row, num_actions: int) -> nn.Module:
    """The agent for an environment that gives such rows."""
    frame_shape = map_tree(lambda x: tuple(x.shape[1:]), row["frame"])
    return make_model(flags.model, frame_shape, num_actions, flags.use_lstm)


def initial_state(model: nn.Module, batch_size: int) -> AgentState:
    """The agent's memory at the start of an episode, [L, B, ...] each; most have none."""
    return model.initial_state(batch_size=batch_size)  # type: ignore[operator]


def test(flags: Flags) -> int:
    """Play with the newest checkpoint."""
    evaluate(flags)
    return 0


def main(flags: Flags) -> int:
    log_to_terminal()
    return train(flags) if flags.mode == "train" else test(flags)


if __name__ == "__main__":
    sys.exit(run_command_line(Flags, main))
