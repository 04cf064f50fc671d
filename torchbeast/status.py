"""Show which clients are connected to a run: `python -m torchbeast.status [RUN]`.

RUN is a run's folder, or its --xpid under ~/logs/torchbeast; without it, the latest run.
"""

import argparse
import csv
import sys
import time
from pathlib import Path

from libtorchbeast.text import table
from torchbeast.run.connections import COLUMNS, FILE
from torchbeast.run.flags import TrainingFlags

OLD_S = 30.0  # if the file is older, the run has ended


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("torchbeast.status", description=__doc__)
    parser.add_argument("run", nargs="?", default="latest", help="the run's folder, or its --xpid")
    parser.add_argument(
        "--savedir", default=TrainingFlags.savedir, type=Path, help="where runs are"
    )
    options = parser.parse_args(args)
    folder = find_run(options.run, options.savedir.expanduser())
    if folder is None:
        where = f"{options.run} is no folder, and {options.savedir} has no run of this name"
        print(f"error: {where}; give a run's folder, or its --xpid.", file=sys.stderr)
        return 2
    try:
        text = describe(folder)
    except FileNotFoundError:
        text = f"No client has connected to the run in {folder}: it has no {FILE}."
    print(text)
    return 0


def find_run(name: str, savedir: Path) -> Path | None:
    return next((path for path in (Path(name), savedir / name) if path.is_dir()), None)


def describe(folder: Path) -> str:
    """The run's connections as a table; FileNotFoundError if no client has ever connected."""
    path = folder / FILE
    age_s = time.time() - path.stat().st_mtime
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    shown = table([COLUMNS, *([row.get(name) or "-" for name in COLUMNS] for row in rows)])
    when = f"{age_s:.0f} s ago" + (", when the run ended" if age_s > OLD_S else "")
    return f"{folder.resolve()}, {when}\n{shown}"


if __name__ == "__main__":
    sys.exit(main())
