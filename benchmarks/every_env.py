"""Trains 5,000 steps on every environment that Gymnasium registers, with `--env ID` alone.

    python benchmarks/every_env.py [ID ...]

What needs a package that is not installed is refused with a sentence. Prints a line for each, and
as the last line one JSON object. Exits with 1 if one ends with a traceback.
"""

import csv
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import gymnasium

TOTAL_STEPS = 5000
TIMEOUT_S = 900


class Outcome(NamedTuple):
    """What came of one environment."""

    env: str
    result: str
    """trained, refused, or failed."""
    steps_per_s: float
    sentence: str

    def __str__(self) -> str:
        speed = f"{self.steps_per_s:,.0f}" if self.result == "trained" else ""
        return f"| {self.env} | {self.result} | {speed} | {self.sentence} |"


def train(env: str, savedir: str) -> Outcome:
    """As a user would, in a process of its own."""
    xpid = env.replace("/", "-")
    command = [sys.executable, "-m", "torchbeast.polybeast", "--env", env, "--xpid", xpid]
    command += ["--total_steps", str(TOTAL_STEPS), "--savedir", savedir]
    try:
        done = subprocess.run(
            command, cwd=savedir, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Outcome(env, "failed", 0.0, f"did not end within {TIMEOUT_S} s")
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    if "Traceback" in done.stderr + done.stdout:
        return Outcome(env, "failed", 0.0, f"traceback: {done.stderr.strip().splitlines()[-1]}")
    if done.returncode == 0:
        return Outcome(env, "trained", _speed(Path(savedir) / xpid / "logs.csv"), "")
    sentence = errors[-1].removeprefix("error: ") if errors else f"exit code {done.returncode}"
    return Outcome(env, "refused" if done.returncode == 2 and errors else "failed", 0.0, sentence)


def _speed(path: Path) -> float:
    """The best of the rows of a log: the first ones are of environments that start."""
    with path.open(newline="") as file:
        return max((float(row["sps"]) for row in csv.DictReader(file)), default=0.0)


def main() -> int:
    ids = sys.argv[1:] or list(gymnasium.registry)
    started = time.monotonic()
    print("| environment | | steps a second | |\n|---|---|---|---|", flush=True)
    outcomes = []
    with tempfile.TemporaryDirectory() as savedir:
        for env in ids:
            outcomes.append(train(env, savedir))
            print(outcomes[-1], flush=True)
    results = [outcome.result for outcome in outcomes]
    figures = {
        "tried": len(ids),
        "trained": results.count("trained"),
        "refused": results.count("refused"),
        "failed": results.count("failed"),
        "minutes": round((time.monotonic() - started) / 60, 1),
    }
    print(json.dumps(figures))
    return int("failed" in results)


if __name__ == "__main__":
    sys.exit(main())
