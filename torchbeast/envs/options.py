"""The flags that describe an environment: its name, arguments, wrappers, preprocessing."""

import dataclasses
import functools
import importlib
import json
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from torchbeast import user_code
from torchbeast.errors import UsageError


@dataclass(frozen=True)
class EnvOptions:
    """The environment and, for Atari, its preprocessing."""

    env: str = "PongNoFrameskip-v4"
    """Environment: Gymnasium id, Catch, Memory, Mock, package.module:factory, package.module:id."""
    env_kwargs: str = ""
    """Arguments of the environment or its factory, as JSON: '{"size": 8}'."""
    imports: Annotated[str, tyro.conf.arg(name="import")] = ""
    """Modules to import first, which register environments (several separated by commas); a
    package.module:function is called, too."""
    wrappers: str = ""
    """Wrappers of each environment, the innermost first: package.module:Wrapper,..."""
    frame_stack: int | None = None
    """Number of observations that the agent sees at once; None: 4 in Atari games, else 1."""
    noop_max: int = 30
    """Atari: maximum number of no-ops at the start of an episode."""
    fire_reset: bool = True
    """Atari: press FIRE at the start and after a lost life, in games that have it."""
    episodic_life: bool = True
    """Atari: a lost life ends the episode for the learner (reported returns are still whole
    games'); not with --wrappers, mode or difficulty."""
    sticky_actions: float | None = None
    """Atari: probability of repeating the last action; None: the id's own (-v4: 0, -v5: 0.25)."""

    @property
    def env_options(self) -> "EnvOptions":
        """The EnvOptions among the flags of a derived class."""
        names = [field.name for field in dataclasses.fields(EnvOptions)]
        return EnvOptions(**{name: getattr(self, name) for name in names})

    @property
    def kwargs(self) -> dict[str, Any]:
        """--env_kwargs as a dict; UsageError if it is no JSON object."""
        try:
            kwargs = json.loads(self.env_kwargs or "{}")
        except ValueError as error:
            raise UsageError(
                f"--env_kwargs must be JSON such as '{{\"size\": 8}}', got {self.env_kwargs} "
                f"({error})."
            ) from error
        if not isinstance(kwargs, dict):
            raise UsageError(
                f"--env_kwargs must be one JSON object such as '{{\"size\": 8}}', "
                f"got {self.env_kwargs}."
            )
        return kwargs

    @property
    def wrapper_classes(self) -> list[Any]:
        """The wrappers that --wrappers names, imported."""
        return [user_code.find(name, "--wrappers") for name in split_names(self.wrappers)]

    def import_modules(self) -> None:
        """Import the modules of --import; functions are called once in a process."""
        for name in split_names(self.imports):
            try:
                if ":" in name:
                    _register(name)
                else:
                    importlib.import_module(name)
            except UsageError:
                raise
            except ImportError as error:
                raise UsageError(
                    f"--import {name}: cannot be imported ({error}); name a module that Python "
                    "finds from here."
                ) from error
            except Exception as error:
                where = user_code.say_where(error)
                raise UsageError(f"--import {name}: it fails with {where}.") from error


@functools.cache
def _register(name: str) -> None:
    """Let a function of a package register its environments."""
    user_code.find(name, "--import")()


def names_of_code(options: EnvOptions) -> list[str]:
    """The names of all that a process must import to make such environments."""
    return [options.env, *split_names(options.wrappers)]


def split_names(names: str) -> list[str]:
    """The names in a flag that takes several, separated by commas."""
    return [name.strip() for name in names.split(",") if name.strip()]
