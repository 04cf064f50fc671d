"""Makes environments from EnvOptions, and finds their spec."""

import inspect
import traceback
from collections.abc import Callable
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv

from libtorchbeast.groups import Broken, spec_of_group
from libtorchbeast.rows import Environments, Spec
from libtorchbeast.seeding import seed_generators
from libtorchbeast.specs import UnknownSpace, spec_or
from libtorchbeast.sync_envs import BadStep, SyncEnvs
from libtorchbeast.wait_notice import say_if_slow
from torchbeast import user_code
from torchbeast.envs import atari
from torchbeast.envs.names import find_maker
from torchbeast.envs.options import EnvOptions
from torchbeast.envs.pettingzoo import ParallelEnvs, check_agents, has_agents
from torchbeast.envs.spaces import observe
from torchbeast.envs.vector import VectorEnvs
from torchbeast.envs.wrappers import stack_frames, wrap
from torchbeast.errors import UsageError


def make_envs(
    options: EnvOptions,
    num_envs: int,
    seed: int | None = None,
    render: bool = False,
    whole_games: bool = False,
) -> Environments:
    """Make `num_envs` environments that step together, each with a seed of its own.

    With `whole_games`, if they are agents of games: about as many, a multiple of a game's agents.
    """
    try:
        return _make_envs(options, num_envs, seed, render, whole_games)
    except UnknownSpace as error:
        raise UsageError(f"--env {options.env}: {error}") from error
    except (gymnasium.error.Error, ImportError) as error:
        raise UsageError(
            f"--env {options.env} cannot be made ({str(error).rstrip('.')}); "
            "install what it needs, or name another."
        ) from error


def make_group(num_envs: int, seed: int, data: bytes = b"", **options: Any) -> Environments:
    """`make_envs` for workers and servers, which pass rows on at once.

    They get its name and plain arguments; `data` is `user_code.pack()` of the process that started
    them. Frames of single environments are not stacked, since passing them on copies them anyway.
    The process's random generators are seeded, too, as an environment may use them.
    """
    user_code.unpack(data)
    seed_generators(seed)
    envs = make_envs(EnvOptions(**options), num_envs, seed)
    if isinstance(envs, SyncEnvs):
        envs.pass_on_at_once()
    return envs


def make_env(options: EnvOptions, render: bool = False) -> Any:
    """Make one environment with Gymnasium's interface, with all wrappers of the options."""
    envs = make_envs(options, num_envs=1, render=render, whole_games=True)
    if isinstance(envs, atari.AtariEnvs):
        envs.close()
        envs = make_envs(options, num_envs=1, render=True)
    if not isinstance(envs, SyncEnvs):
        envs.close()
        raise UsageError(
            f"--env {options.env} makes whole vectors, or games of several agents, and cannot make "
            "one environment for one agent; use its own package to make it."
        )
    return envs.envs[0]


def look_at(options: EnvOptions, num_envs: int | None = None) -> Spec:
    """Make one environment to find its spec; UsageError if groups of `num_envs` are too small."""
    spec, num_agents = look_at_game(options)
    if num_envs is not None:
        check_agents(num_agents, num_envs)
    return spec


def look_at_game(options: EnvOptions) -> tuple[Spec, int]:
    """Make and step one environment; returns its spec and its number of agents, 1 if no game."""
    does = "made or reset"
    with say_if_slow(f"Making one of {options.env}"):
        try:
            envs = make_envs(options, num_envs=1, whole_games=True)
            try:
                spec = spec_of_group(envs, envs.reset())
                if isinstance(envs, SyncEnvs):
                    does = "stepped"
                    envs.try_step()  # one error here, not restarts of each worker
                return spec, getattr(envs, "num_agents", 1)
            finally:
                envs.close()
        except (UnknownSpace, BadStep) as error:
            raise UsageError(f"--env {options.env}: {error}") from error
        except (UsageError, Broken):
            raise
        except Exception as error:
            traceback.print_exc()
            where = user_code.say_where(error)
            raise UsageError(f"--env {options.env} cannot be {does}: {where}.") from error


def is_atari(options: EnvOptions) -> bool:
    """Whether it is one of ALE's games."""
    maker = find_maker(options)
    return isinstance(maker, EnvSpec) and maker.entry_point == atari.ENTRY_POINT


def describe_lives(options: EnvOptions) -> str:
    """A sentence on how the learner treats lost lives; empty if it is no Atari game."""
    maker = find_maker(options)
    if not isinstance(maker, EnvSpec) or maker.entry_point != atari.ENTRY_POINT:
        return ""
    kwargs = {**maker.kwargs, **options.kwargs}
    if not options.episodic_life:
        return "Lost lives end no episode; a game is one."
    if kwargs.get("obs_type") == "ram" or _is_stepped_singly(options, kwargs):
        return "Lost lives end no episode here, as games are stepped one by one; wrap them for it."
    return "A lost life ends the episode for the learner; returns are the game's (--episodic_life)."


def _make_envs(
    options: EnvOptions, num_envs: int, seed: int | None, render: bool, whole_games: bool
) -> Environments:
    maker = find_maker(options)
    if not isinstance(maker, EnvSpec):
        return _from_factory(options, maker, num_envs, seed, render, whole_games)
    kwargs = {**maker.kwargs, **options.kwargs}
    if maker.entry_point == atari.ENTRY_POINT and kwargs.get("obs_type", "rgb") != "ram":
        return _make_atari(options, kwargs, num_envs, seed, render)

    def make_env() -> Any:
        # A default render mode might open a window; others may not take the argument at all.
        render_mode: dict[str, Any] = {}
        if "render_mode" in maker.kwargs:
            render_mode = {"render_mode": None}
        if render:
            render_mode = {"render_mode": "rgb_array"}
        try:
            return gymnasium.make(maker, **{**options.kwargs, **render_mode})
        except TypeError as error:
            if not options.kwargs:
                raise
            raise UsageError(
                f"--env {options.env} cannot be made with --env_kwargs {options.env_kwargs} "
                f"({error})."
            ) from error

    return _single_envs(options, make_env, num_envs, seed)


def _from_factory(
    options: EnvOptions,
    factory: Callable[..., Any],
    num_envs: int,
    seed: int | None,
    render: bool,
    whole_games: bool,
) -> Environments:
    """Environments from a factory: of single ones, of games of several agents, or, if it takes
    `num_envs`, of whole vectors."""
    signature = inspect.signature(factory)
    takes, kwargs = signature.parameters, options.kwargs
    if render and "render_mode" in takes:
        kwargs["render_mode"] = "rgb_array"
    elif "render_mode" in takes and takes["render_mode"].default == "human":  # opens no window
        kwargs.setdefault("render_mode", None)
    if "num_envs" in takes:
        kwargs["num_envs"] = num_envs
        if "autoreset_mode" in takes:  # the only mode that shows all transitions
            kwargs.setdefault("autoreset_mode", AutoresetMode.DISABLED)
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        raise UsageError(
            f"--env {options.env} takes {signature}, got --env_kwargs {options.kwargs} ({error})."
        ) from error
    if "num_envs" in takes:
        return _vector_envs(options, factory(**kwargs), seed)
    first = [factory(**kwargs)]

    def make() -> Any:
        return first.pop() if first else factory(**kwargs)

    if not has_agents(first[0]):
        return _single_envs(options, make, num_envs, seed)
    _refuse_frame_stack(options, "games of several agents")
    wrappers = options.wrapper_classes
    return ParallelEnvs(lambda: wrap(make(), wrappers), num_envs, seed, whole_games)


def _refuse_frame_stack(options: EnvOptions, made: str) -> None:
    if options.frame_stack not in (None, 1):
        raise UsageError(
            f"--frame_stack {options.frame_stack} is for single environments, and --env "
            f"{options.env} makes {made}; stack frames in the factory."
        )


def _vector_envs(options: EnvOptions, env: Any, seed: int | None) -> VectorEnvs:
    env = wrap(env, options.wrapper_classes)
    if not isinstance(env, VectorEnv):
        raise UsageError(
            f"--env {options.env}: a factory that takes num_envs must return a "
            f"gymnasium.vector.VectorEnv, got {type(env).__name__}; leave num_envs out to return "
            "single environments."
        )
    _refuse_frame_stack(options, "a vector of them")
    return VectorEnvs(env, seed)


def _single_envs(
    options: EnvOptions, make_env: Callable[[], Any], num_envs: int, seed: int | None
) -> SyncEnvs:
    wrappers, num_stacked = options.wrapper_classes, options.frame_stack or 1

    def make() -> Any:
        env = wrap(make_env(), wrappers)
        if num_stacked == 1:
            return env
        if not isinstance(env, gymnasium.Env):
            raise UsageError(
                f"--frame_stack {num_stacked} takes Gymnasium's environments, got "
                f"{type(env).__name__}; derive it from gymnasium.Env."
            )
        return stack_frames(env, num_stacked)

    envs = SyncEnvs(make, num_envs, seed, observe, masks=True)
    try:
        spec_or(None, getattr(envs.envs[0], "observation_space", None))
    except UnknownSpace:
        envs.close()
        raise
    return envs


def _make_atari(
    options: EnvOptions, kwargs: dict[str, Any], num_envs: int, seed: int | None, render: bool
) -> Environments:
    """A game with the paper's preprocessing; `kwargs` are those of its id and of --env_kwargs."""
    unknown = options.kwargs.keys() - atari.KWARGS
    if unknown:
        raise UsageError(
            f"--env_kwargs of Atari games may have {', '.join(atari.KWARGS)}, got "
            f"{', '.join(sorted(unknown))}; the other flags, or a factory of your own, say the "
            "rest."
        )
    game = atari.Game(
        name=kwargs["game"],
        noop_max=options.noop_max,
        fire_reset=options.fire_reset,
        sticky_actions=options.sticky_actions
        if options.sticky_actions is not None
        else kwargs.get("repeat_action_probability", 0.25),
        full_action_space=kwargs.get("full_action_space", False),
        max_episode_frames=kwargs.get("max_num_frames_per_episode") or 108_000,
        frame_stack=options.frame_stack or 4,
        mode=kwargs.get("mode"),
        difficulty=kwargs.get("difficulty"),
    )
    if render or _is_stepped_singly(options, kwargs):
        return atari.make_single_games(game, num_envs, seed, options.wrapper_classes, render)
    return atari.AtariEnvs(game, num_envs, seed, options.episodic_life)


def _is_stepped_singly(options: EnvOptions, kwargs: dict[str, Any]) -> bool:
    """Whether games are stepped one by one, as ALE's vector environment lacks these options."""
    return bool(options.wrappers) or any(kwargs.get(k) is not None for k in ("mode", "difficulty"))
