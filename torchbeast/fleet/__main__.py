"""Environment processes that dial a learner, on this machine or on a cluster.

    python -m torchbeast.fleet --launcher ray --num_servers 200 --connect learner:4242 --env Catch
    python -m torchbeast.fleet status [--name NAME]
    python -m torchbeast.fleet stop --name NAME

With --launcher local the first command runs until Ctrl-C or SIGTERM; the others return at once.
"""

import argparse
import dataclasses
import importlib
import logging
import sys
from pathlib import Path
from typing import cast

import tyro

from libtorchbeast import secret
from libtorchbeast.rpc.address import Address
from libtorchbeast.supervisor import NobodyLeft
from libtorchbeast.text import table
from torchbeast.errors import UsageError
from torchbeast.fleet import state as states
from torchbeast.fleet.flags import DEFAULT_SAVEDIR, Flags, check_name
from torchbeast.fleet.state import Launcher, TaskStatus
from torchbeast.fleet.task import LOG_FORMAT

logger = logging.getLogger("torchbeast")

LAUNCHERS = {
    "local": "torchbeast.fleet.local",
    "ray": "torchbeast.fleet.ray_actors",
    "slurm": "torchbeast.fleet.slurm_jobs",
}
VERBS = ("status", "stop")
PROGRAM = "python -m torchbeast.fleet"


def launcher(name: str) -> Launcher:
    """The launcher with this name, imported when it is used: Ray and submitit are optional."""
    return cast(Launcher, importlib.import_module(LAUNCHERS[name]))


def start(flags: Flags) -> int:
    flags.validate()
    assert flags.connect is not None
    if flags.launcher != "local" and Address.parse(flags.connect).is_local:
        logger.warning("%s is a different learner on each node, and nodes without one wait; give "
                       "--connect an address that all nodes reach.", flags.connect)  # fmt: skip
    if flags.name in states.fleets_in(flags.savedir):
        before = states.read(flags.folder)
        both_local = before.launcher == flags.launcher == "local"  # local fleets have a lock
        if not both_local and _find_tasks(before, flags.folder):
            raise UsageError(
                f"A fleet named {flags.name} runs already; stop it with `python -m "
                f"torchbeast.fleet stop --name {flags.name}`, or give another --name."
            )
    states.make_folder(flags.folder)
    return launcher(flags.launcher).start(flags, states.State.of(flags))


def _find_tasks(state: states.State, folder: Path) -> list[TaskStatus]:
    """The fleet's tasks; none of a stopped fleet, without asking a cluster that may be gone."""
    return [] if state.is_stopped else launcher(state.launcher).status(state, folder)


def _describe(name: str, folder: Path) -> str:
    state = states.read(folder)
    tasks = _find_tasks(state, folder)
    shown = table([TaskStatus._fields, *tasks]) if tasks else f"{name} has ended."
    return f"{state.describe()}\n{shown}"


def show_status(name: str | None, savedir: Path) -> None:
    names = states.fleets_in(savedir) if name is None else [name]
    if not names:
        print(f"No fleet was started with --savedir {savedir}.")
    for each in names:
        try:
            print(_describe(each, savedir / each))
        except UsageError as error:  # show the other fleets
            if name is not None:
                raise
            print(f"{each}: {error}")


def stop(name: str, savedir: Path) -> None:
    folder = savedir / name
    state = states.read(folder)
    launcher(state.launcher).stop(state, folder)
    state = dataclasses.replace(states.read(folder), is_stopped=True)
    state.write(folder)
    print(f"{name} has ended.")


def run_verb(args: list[str]) -> int:
    parser = argparse.ArgumentParser(
        PROGRAM, description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("verb", choices=VERBS)
    parser.add_argument("--name", help="the fleet's name; status without it shows all")
    parser.add_argument(
        "--savedir", type=Path, default=DEFAULT_SAVEDIR, help="where fleets' states are kept"
    )
    options = parser.parse_args(args)
    savedir = options.savedir.expanduser().absolute()
    if options.name is not None:
        check_name(options.name)
    if options.verb == "status":
        show_status(options.name, savedir)
        return 0
    stop(options.name or Flags.name, savedir)
    return 0


def main(args: list[str] | None = None) -> int:
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    secret.take()
    args = sys.argv[1:] if args is None else args
    try:
        if args and args[0] in VERBS:
            return run_verb(args)
        return start(tyro.cli(Flags, args=args, prog=PROGRAM, use_underscores=True))
    except (UsageError, NobodyLeft) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1


if __name__ == "__main__":
    sys.exit(main())
