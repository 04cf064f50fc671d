"""Trains 5,000 steps on every environment that Gymnasium registers, with `--env ID` alone.

    python benchmarks/every_env.py [ID ...]

An environment has trained if the command ends with code 0 and its log has 5,000 steps. It is
refused if the command ends with code 2 and one sentence, as it does if a package is not installed.
Anything else has failed. Prints a line for each, and as the last line one JSON object. Exits with 1
if one has failed.
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
    """The result of training on one environment."""

    env: str
    result: str
    """trained, refused, or failed."""
    steps: int = 0
    steps_per_s: float = 0.0
    sentence: str = ""

    def __str__(self) -> str:
        has_trained = self.result == "trained"
        steps, speed = (
            f"{number:,.0f}" if has_trained else "" for number in (self.steps, self.steps_per_s)
        )
        return f"| `{self.env}` | {self.result} | {steps} | {speed} | {self.sentence} |"


def train(env: str, savedir: str) -> Outcome:
    """Train on an environment as a user would, in a process of its own."""
    xpid = env.replace("/", "-")
    command = [sys.executable, "-m", "torchbeast.polybeast", "--env", env, "--xpid", xpid]
    command += ["--total_steps", str(TOTAL_STEPS), "--savedir", savedir]
    try:
        done = subprocess.run(
            command, cwd=savedir, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Outcome(env, "failed", sentence=f"did not end within {TIMEOUT_S} s")
    return judge(env, done, Path(savedir) / xpid / "logs.csv")


def judge(env: str, done: subprocess.CompletedProcess[str], log: Path) -> Outcome:
    """The outcome of a command that has ended, by its exit code, its output and its log."""
    if "Traceback" in done.stderr + done.stdout:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1]
        return Outcome(env, "failed", sentence=f"traceback: {last}")
    if done.returncode == 0:
        steps, speed = _read(log)
        if steps >= TOTAL_STEPS:
            return Outcome(env, "trained", steps, speed)
        return Outcome(env, "failed", sentence=f"ended after {steps:,} of {TOTAL_STEPS:,} steps")
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    if done.returncode == 2 and errors:
        return Outcome(env, "refused", sentence=errors[-1].removeprefix("error: "))
    return Outcome(env, "failed", sentence=f"exit code {done.returncode}")


def _read(log: Path) -> tuple[int, float]:
    """The last step in a log, and the best speed, as the first rows include the start."""
    if not log.exists():
        return 0, 0.0
    with log.open(newline="") as file:
        rows = list(csv.DictReader(file))
    steps = max((int(float(row["step"])) for row in rows), default=0)
    return steps, max((float(row["sps"]) for row in rows), default=0.0)


def main() -> int:
    ids = sys.argv[1:] or list(gymnasium.registry)
    started = time.monotonic()
    print("| environment | | steps | steps per second | |\n|---|---|---|---|---|", flush=True)
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
