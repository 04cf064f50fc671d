"""Finds what makes the environment named with --env: a class, a factory, or a Gymnasium spec."""

import difflib
import importlib
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec

from torchbeast import user_code
from torchbeast.envs.options import EnvOptions
from torchbeast.envs.toys import TOYS
from torchbeast.errors import UsageError

REMOTE = "remote"  # environments that dial in, for PolyBeast's learner only

Maker = Callable[..., Any] | EnvSpec


def find_maker(options: EnvOptions) -> Maker:
    """The class of a toy, a factory of the user's, or the spec behind a Gymnasium id."""
    options.import_modules()
    name = options.env
    if name == REMOTE:
        raise UsageError(
            "--env remote stands for environments that dial in: it needs polybeast_learner "
            "--listen; name an environment to make one here."
        )
    if (handed_over := user_code.get(name)) is not None:
        return handed_over
    if name in TOYS:
        return TOYS[name]
    module_name, colon, attribute = name.partition(":")
    if colon:
        return _find_in_module(name, module_name, attribute)
    return _find_id(name, options.imports)


def check_env(options: EnvOptions) -> None:
    """Raise UsageError unless the options name an environment, with arguments and wrappers."""
    if options.env == REMOTE:
        options.import_modules()
    else:
        find_maker(options)
    _ = options.kwargs, options.wrapper_classes  # UsageError if they are wrong
    if options.frame_stack is not None and options.frame_stack < 1:
        raise UsageError(f"frame_stack must be at least 1, got {options.frame_stack}.")
    if options.noop_max < 0:
        raise UsageError(f"noop_max must not be negative, got {options.noop_max}.")
    if options.sticky_actions is not None and not 0 <= options.sticky_actions <= 1:
        raise UsageError(f"sticky_actions must be from 0 to 1, got {options.sticky_actions}.")


def _find_in_module(name: str, module_name: str, attribute: str) -> Maker:
    """`package.module:factory`, or `package.module:id`, where the module registers the id."""
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UsageError(
            f"--env {name}: cannot import {module_name!r} ({error}); "
            "name a module that Python finds from here, as package.module:factory."
        ) from error
    except Exception as error:
        where = user_code.say_where(error)
        raise UsageError(f"--env {name}: {module_name!r} fails with {where}.") from error
    factory = getattr(module, attribute, None)
    if callable(factory):
        return factory
    try:
        return gymnasium.spec(attribute)
    except gymnasium.error.Error:
        if _is_of_old_gym(attribute):
            raise UsageError(
                f"--env {name}: {attribute!r} is registered with old Gym, and not with Gymnasium; "
                "name its class, or a function of yours that makes it, as package.module:function."
            ) from None
        known = [*(n for n in dir(module) if not n.startswith("_")), *gymnasium.registry]
        raise UsageError(
            f"--env {name}: module {module_name!r} has no factory {attribute!r}, and registers no "
            f"Gymnasium id of that name{did_you_mean(attribute, known) or '.'}"
        ) from None


def _find_id(name: str, imports: str) -> EnvSpec:
    import ale_py

    gymnasium.register_envs(ale_py)
    try:
        spec = gymnasium.spec(name)
    except (gymnasium.error.Error, ImportError) as error:
        if (function := find_register_function(name)) is not None:
            raise UsageError(
                f"No environment is called {name!r} before its package has registered it; add "
                f"--import {function}."
            ) from error
        known = [*TOYS, *gymnasium.registry]
        hint = "with --import MODULE if a module registers it"
        if imports:
            hint = f"--import {imports} has registered none of this name; another module may"
        if _is_of_old_gym(name):
            hint = "this one is old Gym's; name its class as package.module:Class"
        raise UsageError(
            f"No environment is called {name!r}{did_you_mean(name, known)}; --env takes a "
            f"Gymnasium id ({hint}), {', '.join(TOYS)}, or package.module:factory."
        ) from error
    assert isinstance(spec, EnvSpec)
    return spec


def _is_of_old_gym(name: str) -> bool:
    """Whether an imported module has registered the id with Gym, Gymnasium's predecessor."""
    gym = sys.modules.get("gym")
    registry = getattr(getattr(gym, "envs", None), "registry", {})
    return name in getattr(registry, "env_specs", registry)


def find_register_function(name: str) -> str | None:
    """The function of an installed package that registers the ids of `namespace/...`, if any.

    Packages name it as an entry point, which Gymnasium has not called since its version 1.
    """
    namespace, slash, _ = name.partition("/")
    if not slash or any(known.startswith(f"{namespace}/") for known in gymnasium.registry):
        return None
    return next((e.value for e in entry_points(group="gymnasium.envs", name=namespace)), None)


def did_you_mean(name: str, known: list[str]) -> str:
    """The end of a sentence that suggests known names like this one; empty without any."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=0.6)
    return f": did you mean {' or '.join(by_lower[c] for c in close)}?" if close else ""
