"""PolyBeast's learner: agent and learner in one process, with environments in other processes.

    environments ── lanes ──► ActorPool (C++) ──► inference_batcher ──► inference (threads)
                                   └─ rollouts ──► learner_queue ─────► learn     (threads)
    train  (main thread)  starts and supervises all of it, reports, saves checkpoints

Run by itself, it trains with environments that other programs serve, or that dial in; `polybeast`
adds worker processes with environments of its own. T is unroll_length, B a batch size.
"""

import dataclasses
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import libtorchbeast
import nest
from libtorchbeast.malloc import keep_freed_memory
from libtorchbeast.rows import TORCHBEAST_FIELDS, Row, Spec
from libtorchbeast.rpc.address import Address, listening_address, server_address
from libtorchbeast.rpc.gateway_config import GatewaysConfig
from libtorchbeast.rpc.limits import Limits
from libtorchbeast.rpc.security import Security
from libtorchbeast.seeding import derive_seed
from torchbeast.core.learner import Learner
from torchbeast.core.losses import (
    Batch,
    compute_baseline_loss,
    compute_entropy_loss,
    compute_policy_gradient_loss,
)
from torchbeast.core.ranks import ALONE, Place, Ranks
from torchbeast.core.settings import Settings
from torchbeast.core.stats import RunningStats
from torchbeast.envs import REMOTE
from torchbeast.errors import UsageError, require_positive
from torchbeast.models import as_output, build_model
from torchbeast.models.agent import Net
from torchbeast.report import log_to_terminal
from torchbeast.run.batch_size import BatchSize, check_target
from torchbeast.run.checkpoint import UPDATE_S
from torchbeast.run.command_line import run_command_line
from torchbeast.run.connections import Connections
from torchbeast.run.env_sources import RemoteEnvironments, Source
from torchbeast.run.evaluate import evaluate
from torchbeast.run.flags import TrainingFlags, num_cores, with_recipe
from torchbeast.run.model_size import check_fits, most_rollouts
from torchbeast.run.rank_flags import for_rank
from torchbeast.run.remote_actor_offer import ModelOffers
from torchbeast.run.signals import StopRequest
from torchbeast.run.stall import Stall
from torchbeast.run.training import Run, build_learner, run_training
from torchbeast.run.utilization import Stages, Trace
from torchbeast.runtime.distributed import attend_rounds, join_ranks
from torchbeast.runtime.inference_model import ActorModel, num_copies
from torchbeast.runtime.process_setup import own_device, seed_everything
from torchbeast.runtime.threads import Threads, set_cpu_threads, watch

__all__ = [
    "Net",
    "compute_baseline_loss",
    "compute_entropy_loss",
    "compute_policy_gradient_loss",
    "inference",
    "learn",
    "test",
    "train",
]

POLL_S = 0.1  # interval at which the main thread checks signals, workers, the end of training
GOOD_INFERENCE_BATCH = 16  # rows worth a short wait: smaller batches mostly move weights
INFERENCE_PATIENCE_MS = 5
MAX_INFERENCE_BATCH = 1024
OUTPUT_FIELDS = ("action", "policy_logits", "baseline")  # the agent's output for a row
MAX_DEFAULT_SERVERS = 64  # servers to dial by default; absent ones are dialled now and then


@dataclass(frozen=True)
class Flags(TrainingFlags, Security):
    """Train or test an agent with environments that other programs run, here or elsewhere."""

    pipes_basename: str = "unix:/tmp/polybeast"
    """Dial the environment servers at <pipes_basename>.0, .1, ..., unless --server_addresses or
    --listen is given."""
    num_servers: int | None = None
    """Number of these servers; None: all whose unix sockets appear, 64 at most."""
    num_actors: int | None = None
    """Maximum number of groups of environments that take part; None: no limit."""
    server_addresses: str = ""
    """Dial these environment servers instead: host:port,host:port,..."""
    listen: str = ""
    """Listen here for environments that dial in: host:port or unix:/path, several separated by
    commas."""
    num_gateways: int = 1
    """Gateways: processes in which these connections end."""
    connections_per_s: float = Limits().connections_per_s
    """Rate limit: new connections per second from one host to each gateway, beyond a first
    burst."""

    max_stream_envs: int = Limits().max_stream_envs
    """Maximum number of environments in one connection."""
    max_client_envs: int = Limits().max_client_envs
    """Maximum number of environments of one client (a host, or a name in certificates) at each
    gateway."""

    env_timeout_s: float = 120.0
    """Seconds without a step after which environments are given up; workers of this program are
    then restarted."""

    num_inference_threads: int = max(1, num_cores() // 8)
    """Threads that run the agent on batches of rows."""
    num_learner_threads: int = 2 if torch.cuda.is_available() else 1
    """Threads that fetch batches and learn in turn; more than one helps if batches go to a GPU."""
    max_learner_queue_size: int | None = None
    """Rollouts that may wait for the learner before actors must wait: 0, or at least batch_size.
    None: one batch, or 0 with --hold_actors."""
    learner_device: str = "auto"
    """Device of the learner: auto, cpu, cuda, cuda:1 ..."""
    actor_device: str = "auto"
    """Device on which the agent chooses actions; may be the learner's."""
    num_actions: int | None = None
    """Not used any more: environments say how many actions they take."""
    write_profiler_trace: bool = False
    """Record a few seconds of the run to <rundir>/trace.json, for chrome://tracing."""

    @property
    def queue_size(self) -> int:
        if self.max_learner_queue_size is not None:
            return self.max_learner_queue_size
        return 0 if self.hold_actors else self.batch_size

    @property
    def listen_at(self) -> list[str]:
        """Addresses to listen at; several learners of a machine have different ports or paths."""
        given = [address.strip() for address in self.listen.split(",") if address.strip()]
        return [listening_address(address, Place.find().local_rank) for address in given]

    @property
    def dial(self) -> list[str]:
        """The environment servers to dial; several learners divide them among themselves."""
        given = [address.strip() for address in self.server_addresses.split(",")]
        addresses = [address for address in given if address] or self.default_servers
        here = [address for address in addresses if address.startswith("unix:")]
        elsewhere = [address for address in addresses if address not in here]
        place = Place.find()
        return place.share_of(here, on_this_machine=True) + place.share_of(elsewhere)

    @property
    def limits(self) -> Limits:
        return Limits(
            max_stream_envs=self.max_stream_envs,
            max_client_envs=self.max_client_envs,
            connections_per_s=self.connections_per_s,
            step_s=self.env_timeout_s,
            rollout_s=max(Limits().rollout_s, self.env_timeout_s * self.unroll_length),
        )

    @property
    def default_servers(self) -> list[str]:
        """The servers of `polybeast_env` on this machine; none if environments dial in."""
        if self.listen:
            return []
        if self.num_servers is None and not Address.parse(self.pipes_basename).path:
            raise UsageError(
                f"With --pipes_basename {self.pipes_basename} give --num_servers, the number of "
                "ports from there on, or name them all with --server_addresses."
            )
        number = self.num_servers or MAX_DEFAULT_SERVERS
        return [server_address(self.pipes_basename, i) for i in range(number)]

    @property
    def gateways_config(self) -> GatewaysConfig:
        """The gateways' configuration, with the connections that the flags ask for."""
        return GatewaysConfig(
            listen=self.listen_at,
            server_addresses=self.dial,
            expects_servers=bool(self.server_addresses or self.num_servers),
            security=Security.of(self),
            limits=self.limits,
            num_gateways=self.num_gateways,
            max_groups=self.num_actors,
            rows_per_rollout=self.unroll_length + 1,
        )

    def find_device(self, name: str) -> torch.device:
        """The device that a value of --learner_device or --actor_device stands for."""
        if name == "auto" or (name == "cuda" and torch.cuda.is_available()):
            return own_device(use_cuda=not self.disable_cuda)
        return torch.device(name)

    def validate(self) -> None:
        super().validate()
        require_positive(self, "num_inference_threads", "num_learner_threads", "num_gateways")
        require_positive(self, "connections_per_s", "env_timeout_s", "num_actors", "num_servers")
        require_positive(self, "max_stream_envs", "max_client_envs")
        try:
            for address in self.dial:
                self.check_dialing(address)
        except ValueError as error:
            raise UsageError(str(error)) from error
        for name in ("learner_device", "actor_device"):
            if self.disable_cuda and getattr(self, name).startswith("cuda"):
                raise UsageError(
                    f"--{name} {getattr(self, name)} and --disable_cuda contradict each other; "
                    "leave one of them out."
                )
            try:
                device = self.find_device(getattr(self, name))
            except RuntimeError as error:
                raise UsageError(f"--{name} must be auto, cpu or cuda: {error}") from error
            if device.type not in ("cpu", "cuda"):
                raise UsageError(f"--{name} must be auto, cpu or cuda, got {device}.")
            if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
                raise UsageError(
                    f"--{name} is {device}, but PyTorch sees {torch.cuda.device_count()} GPUs; "
                    "use another, or cpu."
                )
        check_target(self)
        if 0 != self.queue_size < self.batch_size:
            raise UsageError(
                f"max_learner_queue_size must be 0 or at least batch_size, got {self.queue_size} < "
                f"{self.batch_size}; raise --max_learner_queue_size or leave it out."
            )


# --------------------------------------------------------------------------------------- inference


def inference(
    flags: Any,
    inference_batcher: Iterable[Any],
    model: nn.Module | ActorModel,
    lock: Any = None,
    *,
    stats: RunningStats | None = None,
) -> None:
    """Answer rows with actions until the batcher is closed. The target of inference threads.

    `lock` is there for code written for TorchBeast, and ignored: an `ActorModel` never changes
    while it is in use.
    """
    device = _device_of(flags, "actor_device")
    with torch.inference_mode(), own_stream(device):
        for batch in watch("inference", inference_batcher, stats):
            try:
                received, agent_state = to_device(batch.get_inputs(), device)
                row = as_row(received)
                with use(model) as (net, version):
                    output, agent_state = net(row, agent_state)
                    answer = as_answer(output, version, as_dict=isinstance(received, dict))
                    answer = to_device((answer, agent_state), torch.device("cpu"))  # synchronous
                batch.set_outputs(answer)
            except Exception as error:
                batch.set_exception(error)
                raise
            if stats is not None:
                stats.observe({"inference_batch_size": row["reward"].shape[1]})


def as_row(row: Any) -> Row:
    """Rows as a dict with `done` and `truncated`, also from TorchBeast's tuple of five fields."""
    row = dict(row if isinstance(row, dict) else zip(TORCHBEAST_FIELDS, row, strict=True))
    row["done"] = row["done"].bool()
    row["truncated"] = row.get("truncated", torch.zeros_like(row["done"])).bool()
    return row


def as_answer(output: Any, version: int, as_dict: bool) -> Any:
    """The agent's output for the actor pool: a dict with `version`, or TorchBeast's tuple."""
    if not as_dict:
        is_tuple = not isinstance(output, dict)
        return output if is_tuple else tuple(output[name] for name in OUTPUT_FIELDS)
    output = as_output(output)
    answer = {name: output[name] for name in OUTPUT_FIELDS}
    return {**answer, "version": torch.full(answer["baseline"].shape, version)}


@contextmanager
def use(model: nn.Module | ActorModel) -> Any:
    """Yield the model to call and the version of its weights, 0 for a plain module."""
    if isinstance(model, ActorModel):
        with model.newest() as newest:
            yield newest
    else:
        yield model, 0


# ------------------------------------------------------------------------------------------- learn


def learn(
    flags: Any,
    learner_queue: Iterable[Any],
    model: nn.Module,
    actor_model: nn.Module | ActorModel,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    stats: dict[str, Any],
    plogger: Any = None,
    lock: threading.Lock = threading.Lock(),  # noqa: B008 (one lock for all threads, on purpose)
    *,
    learner: Learner | None = None,
) -> None:
    """Learn until the queue is closed or training is finished. The target of learner threads.

    After each update the weights are copied to `actor_model`, and `stats` is filled and passed to
    `plogger.log`. `train` passes a `learner`, which has the model, the optimizer and the statistics
    that are reported: add figures of your own with `learner.stats.observe`. Code for TorchBeast
    passes none; one is made from the other arguments.
    """
    if learner is None:
        # In code for TorchBeast, all threads share `lock` and `stats`, and so the counts.
        counts, device = RunningStats(stats), _device_of(flags, "learner_device")
        settings = _settings_of(flags)
        learner = Learner(model, settings, device, optimizer, scheduler, lock=lock, stats=counts)
    figures = learner.stats

    def publish(model: nn.Module, version: int) -> None:
        if isinstance(actor_model, ActorModel):
            actor_model.publish(model, version)
        else:
            actor_model.load_state_dict(model.state_dict())
        stats.update(figures.latest())
        if hasattr(learner_queue, "size"):
            stats["learner_queue_size"] = learner_queue.size()
        if plogger is not None:
            plogger.log(stats)

    with own_stream(learner.device), attend_rounds(learner, publish):
        # One thread fetches while another learns.
        for rollouts in watch("learner", learner_queue, figures):
            (rows, outputs), agent_state = to_device(rollouts, learner.device)
            batch = as_batch(rows, outputs)
            if not learner.update(batch, agent_state, publish):
                return
            figures.observe({"batch_size": batch["done"].shape[1]})


def as_batch(rows: Any, outputs: Any) -> Batch:
    """The batch to learn from. Output t led to row t, so that output 0 is left out."""
    if not isinstance(outputs, dict):
        outputs = dict(zip(OUTPUT_FIELDS, outputs, strict=False))
    batch: Batch = as_row(rows)  # rows of our own actor pool include `source`
    batch["action"] = nest.map(lambda x: x[1:], outputs["action"])
    batch["policy_logits"] = outputs["policy_logits"][1:]
    if "version" in outputs:
        batch["version"] = outputs["version"][1:]
    return batch


def to_device(tensors: Any, device: torch.device) -> Any:
    """Copy a nest of tensors to `device`; to a GPU asynchronously, from pinned memory."""
    if device.type == "cuda":
        return nest.map(lambda t: t.pin_memory().to(device, non_blocking=True), tensors)
    return nest.map(lambda t: t.to(device), tensors)


def own_stream(device: torch.device) -> AbstractContextManager[Any]:
    """Give this thread a CUDA stream of its own, so that it does not wait for other threads."""
    if device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))


def synchronize(*devices: torch.device) -> None:
    """Wait for this thread's work on GPUs, which other threads' streams would not wait for."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


# ---------------------------------------------------------------------------------- train and test


def open_source(flags: Flags, stop: StopRequest, ranks: Ranks = ALONE) -> Source:
    """Open the connections that the flags ask for, as a source of environments."""

    def try_model(spec: Spec) -> None:
        sized = with_recipe(flags, spec)
        num_rows = (sized.queue_size + sized.batch_size) * (sized.unroll_length + 1)
        check_fits(
            lambda: build_model(sized, spec),
            sized,
            num_copies=num_copies(sized.num_inference_threads),
            rollout_bytes=num_rows * spec.row_bytes,
        )

    source = RemoteEnvironments(flags.env_options, flags.gateways_config, try_model)
    source.open(stop, ranks)
    return source


def train(
    flags: Flags,
    stop: StopRequest | None = None,
    make_source: Callable[[Any, StopRequest, Ranks], Source] = open_source,
) -> int:
    """Train until `total_steps`, or until a signal asks to stop. Returns the exit code."""
    keep_freed_memory()
    device = flags.find_device(flags.learner_device)
    with stop or StopRequest() as stop, join_ranks(stop, device) as ranks:
        flags = for_rank(flags, ranks)
        seed_everything(flags.seed)
        source = make_source(flags, stop, ranks)
        try:
            if flags.env == REMOTE:
                flags = with_recipe(flags, source.spec)
            learner = build_learner(flags, source.spec, device, ranks)
            return run_training(
                flags,
                learner,
                lambda run: act_and_learn(flags, learner, source, run),
                stop,
                source.spec,
            )
        finally:
            source.close()


def act_and_learn(flags: Flags, learner: Learner, source: Source, run: Run) -> None:
    """The main thread's loop. When it returns, all actors and threads have ended."""
    rollout_bytes = (flags.unroll_length + 1) * source.spec.row_bytes
    sizes = BatchSize(flags, source.num_envs, most_rollouts(rollout_bytes))
    learner_queue = libtorchbeast.BatchingQueue(
        batch_dim=1,
        minimum_batch_size=sizes.batch_size,
        maximum_batch_size=sizes.batch_size,
        maximum_queue_size=sizes.queue_size,
    )
    inference_batcher = libtorchbeast.DynamicBatcher(
        batch_dim=1,
        minimum_batch_size=max(1, min(source.num_envs // 2, GOOD_INFERENCE_BATCH)),
        maximum_batch_size=MAX_INFERENCE_BATCH,
        timeout_ms=INFERENCE_PATIENCE_MS,
    )
    initial_state = learner.model.initial_state(batch_size=1)  # type: ignore[operator]
    initial_state = nest.map(lambda t: t.detach().cpu(), initial_state)
    pool = libtorchbeast.ActorPool(
        unroll_length=flags.unroll_length,
        learner_queue=learner_queue,
        inference_batcher=inference_batcher,
        initial_agent_state=initial_state,
    )
    learner.name_source = pool.name_source
    connections = Connections(
        learner_queue, flags.rundir, lambda: learner.version, pool.client_of, source.clients
    )
    learner.rounds.had_clients = lambda: connections.had_clients
    offers = ModelOffers(flags, learner, source.spec, sizes.queue_size)
    pool.offer_model = offers.make
    actor_device = flags.find_device(flags.actor_device)
    actor_model = ActorModel(
        learner.model,
        actor_device,
        learner.version,
        flags.compile,
        num_users=flags.num_inference_threads,
        on_publish=offers.publish,
        autocast=flags.autocast,
    )
    synchronize(learner.device, actor_device)
    finished = learner.finished

    def run_learner() -> None:
        set_cpu_threads(flags.learner_cpu_threads)
        torch.set_flush_denormal(True)  # unused weights' tiny mean squares are slow
        learn(
            flags,
            connections,
            learner.model,
            actor_model,
            learner.optimizer,
            learner.scheduler,
            stats={},
            learner=learner,
        )

    def run_inference() -> None:
        set_cpu_threads(1)
        inference(flags, inference_batcher, actor_model, stats=learner.stats)

    threads = [
        Threads("inference", flags.num_inference_threads, run_inference, finished),
        Threads("learner", flags.num_learner_threads, run_learner, finished),
        Threads("actor-pool", 1, pool.run, finished),
    ]
    stages = Stages(learner.stats, pool, learner_queue, inference_batcher)
    stall = Stall(
        learner.stats,
        late=source.late,
        count_steps=pool.count,
        count_rollouts=lambda: (learner_queue.size(), sizes.batch_size),
    )
    trace = Trace(flags.rundir / "trace.json") if flags.write_profiler_trace else None
    first_version = learner.version
    try:
        # After a resume the environments must not repeat the same episodes.
        source.start(pool, derive_seed(flags.seed, learner.version))
        while not finished.is_set() and not run.stop_requested:
            source.poll()
            stages.poll()
            connections.poll()
            sizes.poll(learner_queue, offers.in_flight if pool.brings_rollouts else 1)
            learner.stats.add_info(flags.choose_info(pool.take_info()))
            if trace is not None and learner.version > first_version:
                trace.record()
            run.tick(stall)
            finished.wait(POLL_S)
        if trace is not None:
            trace.close()
    finally:
        finished.set()
        if learner.stats.step >= flags.total_steps:
            source.finish()
        learner_queue.close()
        inference_batcher.close()
        pool.close()
        with ExitStack() as stack:  # joins all of them, even if one raises
            for group in threads:
                stack.callback(group.join, UPDATE_S)


def test(flags: Flags) -> int:
    """Play episodes with a checkpoint of the run. Returns the exit code."""
    evaluate(flags)
    return 0


def main(flags: Flags) -> int:
    log_to_terminal()
    return train(flags) if flags.mode == "train" else test(flags)


def _device_of(flags: Any, name: str) -> torch.device:
    """The device in our own flags, or in a namespace that has a device or its name."""
    if isinstance(flags, Flags):
        return flags.find_device(getattr(flags, name))
    return torch.device(getattr(flags, name, "cpu"))


def _settings_of(flags: Any) -> Settings:
    """Settings from flags; those that code for TorchBeast lacks get TorchBeast's values."""
    if isinstance(flags, Settings):
        return flags
    default = dataclasses.asdict(Settings(vtrace_lambda=1.0, reward_clipping="abs_one"))
    values = {name: getattr(flags, name, value) for name, value in default.items()}
    # Such code ends training itself, by closing the queue.
    return Settings(**{**values, "total_steps": sys.maxsize})


if __name__ == "__main__":
    sys.exit(run_command_line(Flags, main))
