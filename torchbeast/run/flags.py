"""The flags that both beasts share, their validation, and where their values come from."""

import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, TypeVar, get_args, get_type_hints

import tyro

from libtorchbeast.episode_info import InfoSums
from libtorchbeast.rows import Spec
from torchbeast.core.ranks import Place
from torchbeast.core.settings import Settings
from torchbeast.envs import REMOTE, EnvOptions, check_env, look_at_game
from torchbeast.errors import UsageError, require_positive
from torchbeast.models import check_model
from torchbeast.run import recipes

Origin = Literal["recipe", "agents of a game", "saved run", "command line"]
STRENGTH: tuple[Origin, ...] = get_args(Origin)  # weakest first


def num_cores() -> int:
    """CPU cores that this process may use: its share, if there are several learners here."""
    has_affinity = hasattr(os, "sched_getaffinity")
    number = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(1, number // Place.find().local_size)


@dataclass(frozen=True)
class TrainingFlags(Settings, EnvOptions):
    """The flags of a training run that both beasts share."""

    mode: Literal["train", "test", "test_render"] = "train"
    """train; test: play episodes with a checkpoint; test_render: also write a video of them."""
    xpid: str | None = None
    """Name of the run. The name of an earlier run resumes or tests it; without a name, the test
    modes play the latest run."""
    recipe: Literal["default", "paper"] = "default"
    """Where other flags get their defaults: default chooses by the environment, for a small
    machine; paper takes the IMPALA paper's settings for Atari."""

    # Logs, checkpoints, evaluation.
    savedir: Path = Path("~/logs/torchbeast")
    """Folder of all runs; this run's files are in <savedir>/<xpid>."""
    disable_checkpoint: bool = False
    """Write no checkpoint and read none."""
    checkpoint_interval_s: float = 300.0
    """Seconds between checkpoints; one is always written at the end."""
    keep_checkpoints: int = 3
    """Number of recent checkpoints to keep, as model-step-<N>.tar; 1: only model.tar and
    model-best.tar."""
    checkpoint: str = "model.tar"
    """In the modes test and test_render: the run's checkpoint to play, e.g. model-best.tar."""
    init_from: str | None = None
    """Start a new run with the weights of another run: its name, its folder, or a checkpoint."""
    log_interval_s: float = 5.0
    """Seconds between rows in the logs; rows are more frequent at the start."""
    log_info: str = "all"
    """Which numbers in the last `info` of an episode to log: all, none, or names separated by
    commas."""
    eval_every: int = 0
    """Environment steps between evaluations, which run in a separate process; 0: none."""
    eval_episodes: int = 10
    """Episodes to play in each evaluation."""
    num_episodes: int = 10
    """Episodes to play in the modes test and test_render."""
    sample_actions: bool = False
    """In tests and evaluations, sample actions from the policy instead of taking the most likely
    ones."""
    seed: int = 1
    """Random seed of the initial weights, the environments and the sampled actions."""

    # The model.
    model: str = "auto"
    """auto (chosen by the observations), shallow, deep, mlp, or package.module:Class of a model of
    your own."""
    use_lstm: bool = False
    """Give the agent a memory: an LSTM."""
    separate_nets: bool = False
    """Give the baseline of an MLP an encoder of its own, and float actions standard deviations that
    do not depend on the state."""
    normalize_images: bool = False
    """Built-in image nets: normalise each pixel by its running mean and standard deviation."""
    squash_actions: bool = False
    """Squash sampled actions of a bounded Box with tanh, instead of clipping them to the bounds."""

    # The machine.
    target_policy_lag: int | None = 16
    """Let batches grow with the number of environments, from batch_size on, so that rollouts are at
    most this many updates old when they are learnt from (0 with --hold_actors). None: batches have
    batch_size rollouts; so they have if --batch_size is given and this flag is not."""
    hold_actors: bool = False
    """Let actors wait until the learner has learnt from their rollouts. If a batch has room for a
    rollout of each environment, policy lag is then 0: the policy that learns is the one that
    acted."""
    disable_cuda: bool = False
    """Learn on the CPU even if there is a GPU."""
    learner_cpu_threads: int = min(8, max(1, num_cores() // 2))
    """CPU cores that one update may use (PyTorch's intra-op threads)."""

    sources: Annotated[dict[str, Origin], tyro.conf.Fixed, tyro.conf.Suppress] = field(
        default_factory=dict, compare=False
    )
    """By flag, where its value comes from; flags that are missing here have their defaults."""

    @property
    def rundir(self) -> Path:
        """The folder of this run's files."""
        return self.savedir.expanduser() / (self.xpid or "latest")

    @property
    def info_names(self) -> list[str]:
        """The names listed in --log_info; empty if it is `all` or `none`."""
        if self.log_info in ("all", "none"):
            return []
        return [name.strip() for name in self.log_info.split(",")]

    def choose_info(self, info: InfoSums) -> InfoSums:
        """The numbers in `info` that --log_info selects."""
        if self.log_info == "all" or not info:
            return info
        return {name: sums for name, sums in info.items() if name in self.info_names}

    def place_environments(self) -> dict[str, Any]:
        """Values of flags for the number of environments and processes, by the other flags.

        Programs that make environments override it; called by `with_recipe`.
        """
        return {}

    def is_given(self, name: str) -> bool:
        """Whether the command line sets this flag."""
        return self.sources.get(name) == "command line"

    def as_plain_dict(self) -> dict[str, Any]:
        """All flags as numbers, strings and None, for checkpoints and meta.json."""
        flags = dataclasses.asdict(self)
        del flags["sources"]
        return {k: str(v) if isinstance(v, Path) else v for k, v in flags.items()}

    def validate(self) -> None:
        """Raise UsageError with one sentence if the flags cannot work."""
        for name, value in dataclasses.asdict(self).items():
            if isinstance(value, float) and math.isnan(value):
                raise UsageError(f"{name} must be a number, got nan.")
        require_positive(self, *_POSITIVE)
        for name in _NOT_NEGATIVE:
            if (getattr(self, name) or 0) < 0:
                raise UsageError(f"{name} must not be negative, got {getattr(self, name)}.")
        for name in _FRACTIONS:
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise UsageError(f"{name} must be from 0 to 1, got {value}.")
        if self.xpid is not None and (not self.xpid or "/" in self.xpid or self.xpid[0] == "."):
            raise UsageError(
                f"xpid names a folder below --savedir, got {self.xpid!r}; leave out slashes."
            )
        if self.mode == "train" and self.checkpoint != type(self).checkpoint:
            raise UsageError(
                f"--checkpoint {self.checkpoint} is for the modes test and test_render; "
                "--init_from starts a new run from its weights."
            )
        if self.mode != "train" and not Place.find().is_alone:
            raise UsageError(
                f"--mode {self.mode} is for one process, got {Place.find().size} of them; leave "
                "out torchrun."
            )
        if self.eval_every and self.env == REMOTE:
            raise UsageError(
                "--eval_every needs an environment that can be made here, got --env remote; "
                "leave it out."
            )
        if self.normalize_images and ":" in self.model:
            raise UsageError(
                f"--normalize_images is for the built-in nets, got --model {self.model}; leave it "
                "out, and let the model scale its frames."
            )
        check_model(self.model)
        check_env(self.env_options)


_POSITIVE = (
    "total_steps",
    "batch_size",
    "unroll_length",
    "learner_cpu_threads",
    "keep_checkpoints",
    "num_episodes",
    "eval_episodes",
    "learning_rate",
    "epsilon",
    "adam_epsilon",
    "grad_norm_clipping",
    "clip_rho_threshold",
    "clip_pg_rho_threshold",
    "clip_c_threshold",
    "num_passes",
    "num_minibatches",
    "log_interval_s",
    "checkpoint_interval_s",
)
_NOT_NEGATIVE = (
    "seed",
    "entropy_cost",
    "baseline_cost",
    "clip_ratio",
    "max_policy_lag",
    "weight_decay",
    "eval_every",
)
_FRACTIONS = ("discounting", "alpha", "momentum", "vtrace_lambda")

FlagsT = TypeVar("FlagsT", bound=TrainingFlags)


def with_values(flags: FlagsT, source: Origin, values: Mapping[str, Any]) -> FlagsT:
    """The flags with these values, except where a stronger source has set a flag already.

    So sources may be applied in any order, also repeatedly. Names that are no flags of this program
    are ignored: recipes and saved runs serve several programs.
    """
    weaker = STRENGTH[: STRENGTH.index(source) + 1]
    known = {field.name for field in dataclasses.fields(flags)} - {"sources"}
    changes = {
        name: value
        for name, value in values.items()
        if name in known and flags.sources.get(name, source) in weaker
    }
    sources = {**flags.sources, **dict.fromkeys(changes, source)}
    return dataclasses.replace(flags, **changes, sources=sources)


def given_flags(flags_class: type[TrainingFlags], args: list[str]) -> dict[str, Any]:
    """The values that the command line sets, whether or not they equal the defaults."""
    tyro.cli(flags_class, args=args, use_underscores=True)  # handles --help and errors
    hints = get_type_hints(flags_class, include_extras=True)
    names = [field.name for field in dataclasses.fields(flags_class) if field.name != "sources"]
    given = TypedDict("given", {name: hints[name] for name in names}, total=False)  # type: ignore
    return dict(tyro.cli(given, args=args, use_underscores=True))


def with_recipe(flags: FlagsT, spec: Spec | None = None) -> FlagsT:
    """The flags with the recipe's defaults for environments with this `spec`.

    Without a spec, an environment is made to find it. With --env remote there is none yet: call
    this again once the first environments have dialled in.
    """
    num_agents = 1
    if spec is None and flags.env != REMOTE:
        spec, num_agents = look_at_game(flags.env_options)
    values = recipes.find(flags.env_options, flags.recipe, flags.model, spec)
    flags = _with_places(with_values(flags, "recipe", values), num_agents)
    flags = with_values(flags, "recipe", flags.place_environments())
    return _with_places(flags, num_agents)


def _with_places(flags: FlagsT, num_agents: int) -> FlagsT:
    """The flags with places for all agents of a game in each group that this program makes."""
    if getattr(flags, "envs_per_actor", num_agents) >= num_agents:
        return flags
    return with_values(flags, "agents of a game", {"envs_per_actor": num_agents})


def with_given_batch(flags: FlagsT) -> FlagsT:
    """Keep a given --batch_size fixed, unless --target_policy_lag is given as well."""
    if not flags.is_given("batch_size") or flags.is_given("target_policy_lag"):
        return flags
    return with_values(flags, "command line", {"target_policy_lag": None})
