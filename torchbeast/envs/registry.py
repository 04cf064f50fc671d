"""From the name given with --env to running environments."""

import dataclasses
import difflib
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium

from libtorchbeast.environments import SyncEnvs
from libtorchbeast.rows import Unstacked
from libtorchbeast.seeding import seed_generators
from torchbeast.envs import atari
from torchbeast.envs.spaces import Environments, count_actions, observer
from torchbeast.envs.toys import TOYS
from torchbeast.envs.vector import VectorEnvs
from torchbeast.errors import UsageError

REMOTE = "remote"  # whatever dials in: only PolyBeast's learner can do with that


@dataclass(frozen=True)
class EnvOptions:
    """The environment and, for Atari, its preprocessing."""

    env: str = "PongNoFrameskip-v4"
    """Gymnasium id, Catch, Memory, Mock, or package.module:factory."""
    noop_max: int = 30
    """Atari: at most this many no-ops at the start of an episode."""
    fire_reset: bool = True
    """Atari: press FIRE at the start, in games that have it."""
    episodic_life: bool = False
    """Atari: a lost life ends the episode for the learner (returns stay the game's)."""
    sticky_actions: float | None = None
    """Atari: probability to repeat the last action; None: what the id says (-v4: 0, -v5: 0.25)."""

    @property
    def env_options(self) -> "EnvOptions":
        """These alone, of a class that has more flags."""
        names = [field.name for field in dataclasses.fields(EnvOptions)]
        return EnvOptions(**{name: getattr(self, name) for name in names})


def make_envs(
    options: EnvOptions, num_envs: int, seed: int | None = None, render: bool = False
) -> Environments:
    """`num_envs` environments that step together, each with a seed of its own."""
    try:
        return _make_envs(options, num_envs, seed, render)
    except (gymnasium.error.Error, ImportError) as error:
        raise UsageError(
            f"--env {options.env} cannot be made ({str(error).rstrip('.')}); "
            "install what it needs, or name another."
        ) from error


def make_group(num_envs: int, seed: int, **options: Any) -> Environments:
    """`make_envs` for processes that step environments and pass their rows on at once.

    Workers and servers get its name and plain arguments. Frames of single environments are left
    `Unstacked`. The process's random generators are seeded, too: an environment may use them.
    """
    seed_generators(seed)
    envs = make_envs(EnvOptions(**options), num_envs, seed)
    if isinstance(envs, SyncEnvs):
        envs.join = Unstacked
    return envs


def _make_envs(options: EnvOptions, num_envs: int, seed: int | None, render: bool) -> Environments:
    name = options.env
    if name == REMOTE:
        raise UsageError(
            "--env remote stands for environments that dial in: it needs polybeast_learner "
            "--listen; name an environment to make one here."
        )
    if name in TOYS:
        return _single_envs(TOYS[name], num_envs, seed)
    factory = _find_factory(name)
    if factory is not None:
        return _from_factory(name, factory, num_envs, seed)
    spec = _find_spec(name)
    if spec.entry_point == atari.ENTRY_POINT and spec.kwargs.get("obs_type", "rgb") != "ram":
        game_options = {
            "noop_max": options.noop_max,
            "fire_reset": options.fire_reset,
            "sticky_actions": options.sticky_actions
            if options.sticky_actions is not None
            else spec.kwargs.get("repeat_action_probability", 0.25),
            "full_action_space": spec.kwargs.get("full_action_space", False),
            "max_episode_frames": spec.kwargs.get("max_num_frames_per_episode") or 108_000,
        }
        game = spec.kwargs["game"]
        if render:
            return atari.make_rendered(game, num_envs, seed, game_options)
        return atari.AtariEnvs(
            game, num_envs, seed, episodic_life=options.episodic_life, **game_options
        )

    render_mode = "rgb_array" if render else None
    return _single_envs(lambda: gymnasium.make(name, render_mode=render_mode), num_envs, seed)


def _single_envs(make_env: Callable[[], Any], num_envs: int, seed: int | None) -> SyncEnvs:
    envs = SyncEnvs(make_env, num_envs, seed)
    env = envs.envs[0]
    count_actions(getattr(env, "action_space", None))  # or UsageError
    envs.observe = observer(getattr(env, "observation_space", None))
    return envs


def _from_factory(
    name: str, factory: Callable[..., Any], num_envs: int, seed: int | None
) -> Environments:
    """A factory of single environments, or of whole vectors if it takes `num_envs`."""
    if "num_envs" not in inspect.signature(factory).parameters:
        return _single_envs(factory, num_envs, seed)
    env = factory(num_envs=num_envs)
    if not isinstance(env, gymnasium.vector.VectorEnv):
        raise UsageError(
            f"--env {name}: a factory that takes num_envs must return a "
            f"gymnasium.vector.VectorEnv, got {type(env).__name__}; leave num_envs out to return "
            "single environments."
        )
    return VectorEnvs(env, seed)


def check_env(name: str) -> None:
    """Raise UsageError unless `name` names an environment."""
    if name not in (*TOYS, REMOTE) and _find_factory(name) is None:
        _find_spec(name)


def _find_factory(name: str) -> Callable[[], Any] | None:
    """`package.module:factory` to the factory; None if the name is of another kind."""
    module_name, colon, attribute = name.partition(":")
    if not colon:
        return None
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UsageError(
            f"--env {name}: cannot import {module_name!r} ({error}); "
            "name a module that Python finds from here, as package.module:factory."
        ) from error
    factory = getattr(module, attribute, None)
    if factory is None and "-v" in attribute:
        return None  # Gymnasium's own notation: import the module, then make the id
    if not callable(factory):
        raise UsageError(
            f"--env {name}: module {module_name!r} has no factory {attribute!r}"
            f"{_did_you_mean(attribute, dir(module))}."
        )
    return factory


def _find_spec(name: str) -> Any:
    import ale_py

    gymnasium.register_envs(ale_py)
    try:
        return gymnasium.spec(name)
    except (gymnasium.error.Error, ImportError) as error:
        known = [*TOYS, *gymnasium.registry]
        raise UsageError(
            f"No environment is called {name!r}{_did_you_mean(name, known)}; --env takes a "
            f"Gymnasium id, {', '.join(TOYS)}, or package.module:factory."
        ) from error


def _did_you_mean(name: str, known: list[str]) -> str:
    by_lower = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=0.6)
    return f": did you mean {' or '.join(by_lower[c] for c in close)}?" if close else ""
