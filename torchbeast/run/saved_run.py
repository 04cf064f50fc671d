"""A saved run's flags, as the defaults when the run is resumed or tested.

A checkpoint is data: code that it names runs only if the command line names it, too.
"""

import dataclasses
import shlex
import sys
from pathlib import Path
from typing import Any

from torchbeast.errors import UsageError
from torchbeast.run import checkpoint
from torchbeast.run.flags import FlagsT, TrainingFlags, with_values

# Flags of one start on one machine, which are not taken over from a saved run. Nor are the flags
# that a program adds to TrainingFlags: processes, devices, and connections, which no file may open.
OF_THE_START = {
    "mode",
    "xpid",
    "savedir",
    "disable_checkpoint",
    "checkpoint",
    "init_from",
    "num_episodes",
    "disable_cuda",
    "learner_cpu_threads",
    "sources",
}
OF_THE_RUN = {field.name for field in dataclasses.fields(TrainingFlags)} - OF_THE_START


def with_saved_flags(flags: FlagsT, args: list[str] | None) -> FlagsT:
    """Take over the flags of the saved run that --xpid names, unless the command line sets them.

    `args` is the command line, for messages; None if a Python program gives the flags.
    """
    path = flags.rundir / flags.checkpoint
    is_new_run = flags.mode == "train" and (flags.xpid is None or flags.disable_checkpoint)
    if is_new_run or not checkpoint.find(path):
        return flags
    _, contents = checkpoint.load_newest(path)
    saved = {k: v for k, v in contents.get("flags", {}).items() if k in OF_THE_RUN}
    if "recipe" in flags.sources and flags.recipe != saved.get("recipe", flags.recipe):
        raise UsageError(
            f"--recipe {flags.recipe} does not reach {flags.rundir}, which goes on with its own "
            "settings; change them one by one, or give another --xpid for a new run."
        )
    _check_that_code_is_named(flags, saved, args)
    # Flags that an older program did not have yet keep its behaviour, whatever today's recipe says.
    unknown = {name: getattr(type(flags)(), name) for name in OF_THE_RUN - saved.keys()}
    if "target_policy_lag" in unknown:
        unknown["target_policy_lag"] = None  # older programs' batches did not grow
    return with_values(flags, "saved run", {**unknown, **saved})


def _check_that_code_is_named(flags: FlagsT, saved: dict[str, Any], args: list[str] | None) -> None:
    missing = {
        name: value
        for name, value in saved.items()
        if names_code(name, value) and flags.sources.get(name) != "command line"
    }
    if not missing:
        return
    if args is None:
        raise code_is_missing(flags.rundir, missing)
    flags_of = {"imports": "import"}  # a keyword of Python
    words = [
        word for name, value in missing.items() for word in (f"--{flags_of.get(name, name)}", value)
    ]
    raise UsageError(
        f"{flags.rundir} was trained with code of yours, and a checkpoint cannot run code; "
        f"name it, too: {command([*args, *words])}"
    )


def code_is_missing(run: Path, missing: dict[str, Any]) -> UsageError:
    """The error if a Python program does not pass the code that a run was trained with."""
    words = [f"{name}=... (it was {value})" for name, value in missing.items()]
    return UsageError(
        f"{run} was trained with code of yours, and a checkpoint cannot run code; pass it, too: "
        f"{', '.join(words)}."
    )


def names_code(name: str, value: Any) -> bool:
    """Whether this flag, if taken from a file, would make Python import what the file names."""
    is_path = name in ("env", "model") and ":" in str(value)
    return is_path or (name in ("imports", "wrappers") and bool(value))


def command(args: list[str]) -> str:
    """A shell command that runs this program with other arguments."""
    spec = sys.modules["__main__"].__spec__
    program = ["-m", spec.name] if spec else [sys.argv[0]]
    return shlex.join([sys.executable, *program, *args])


def changes(saved: dict[str, Any], flags: TrainingFlags) -> dict[str, tuple[Any, Any]]:
    """The flags that differ from those in the checkpoint, by name: old value, new value."""
    now = flags.as_plain_dict()
    names = [name for name in now if name in saved and saved[name] != now[name]]
    return {name: (saved[name], now[name]) for name in names}


def describe_changes(saved: dict[str, Any], flags: TrainingFlags) -> list[str]:
    """`changes` in words: flags of the run that the command line changes, and flags of a start."""
    arrows = {n: f"{n} {old} -> {new}" for n, (old, new) in changes(saved, flags).items()}
    run = [text for name, text in arrows.items() if name in OF_THE_RUN]
    start = [text for name, text in arrows.items() if name not in {*OF_THE_RUN, "xpid", "mode"}]
    lines = [f"Changed by the command line: {', '.join(run)}"] if run else []
    return lines + ([f"Of this start, not of the run: {', '.join(start)}"] if start else [])


def describe_sources(flags: TrainingFlags) -> list[str]:
    """Lines that say which flags differ from the defaults in --help, and where they come from."""
    defaults = type(flags)()
    lines: dict[str, list[str]] = {}
    for name, source in flags.sources.items():
        value = getattr(flags, name)
        if value != getattr(defaults, name) and name not in ("env", "xpid", "savedir", "mode"):
            lines.setdefault(source, []).append(f"{name} {value}")
    return [f"Differs from --help ({source}): {', '.join(said)}" for source, said in lines.items()]
