"""Evaluation while training: a second process plays episodes with the newest weights.

    Evaluation   in the training process: a thread that writes weights and reads results
    main         the second process: waits for weights, plays, writes the returns

They communicate through two files in the run's folder, so that training goes on whatever happens
to the second process.
"""

import dataclasses
import io
import json
import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from libtorchbeast.groups import describe_failure
from libtorchbeast.helper_process import Helper, SupervisorLine
from libtorchbeast.output_log import FILE_NAME as OUTPUT_NAME
from libtorchbeast.output_log import OutputLog
from libtorchbeast.seeding import derive_seed
from libtorchbeast.supervisor import Child, Supervisor
from torchbeast import user_code
from torchbeast.core.learner import Learner
from torchbeast.run.checkpoint import between_updates, load, write_whole
from torchbeast.run.evaluate import Player
from torchbeast.run.flags import TrainingFlags
from torchbeast.runtime.disk_errors import IgnoreWriteErrors

logger = logging.getLogger("torchbeast")

WEIGHTS = "eval-weights.tar"
RESULT = "eval-result.json"
SEEDS = 1_000_003  # for `derive_seed`: a number that no worker has
POLL_S = 0.25
STEP_S = 120.0  # time limit of a heartbeat: more than an environment's step takes
STOP_S = 5.0
JOIN_S = 30.0  # more than it takes to end the process
NICENESS = 10  # training comes first


class Evaluation:
    """While entered, evaluates every `eval_every` steps; with 0 it does nothing."""

    def __init__(self, flags: TrainingFlags, learner: Learner) -> None:
        self._flags = flags
        self._learner = learner
        self._weights, self._result = flags.rundir / WEIGHTS, flags.rundir / RESULT
        self._next_at = 0
        self._is_playing = False
        self._write_errors = IgnoreWriteErrors("the weights for evaluation")
        self._code = b""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="evaluation", daemon=True)

    def __enter__(self) -> None:
        if self._flags.eval_every:
            self._code = user_code.pack()
            self._plan_next()
            self._remove_files()  # left by a run that was killed
            self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join(JOIN_S)
            if self._thread.is_alive():
                logger.error("The evaluation must end within %.0f s, and has not; the program ends "
                             "without it.", JOIN_S)  # fmt: skip
            self._remove_files()

    def _run(self) -> None:
        """The thread's loop, with a supervisor of its own: when it waits, training does not."""
        output = OutputLog(self._flags.rundir / OUTPUT_NAME)
        child = Child("Evaluation", self._start, self._look_after_its_end)
        supervisor = Supervisor([child], STEP_S, keep_output=output.keep)
        try:
            while not self._ended.wait(POLL_S):
                with self._write_errors:
                    self._hand_over()
                supervisor.poll()
                self._take_in()
        except Exception as error:
            logger.error("Evaluations end here for this run, and training goes on: %s", error)
        finally:
            supervisor.close(lambda: self._terminate(child), STOP_S)

    def _start(self, num_starts: int) -> Helper:
        config = {"flags": self._flags.as_plain_dict()}
        return Helper("torchbeast.run.eval_process", config, catch_output=True, data=self._code)

    def _look_after_its_end(self) -> None:
        """After the process has ended: the next one plays its weights, if they are still there."""
        self._is_playing = self._weights.exists() or self._result.exists()

    @staticmethod
    def _terminate(child: Child) -> None:
        if isinstance(child.process, Helper):
            child.process.terminate()

    def _hand_over(self) -> None:
        """Write the newest weights for the process, if one is due and it has played the last."""
        if self._is_playing or self._learner.stats.step < self._next_at:
            return
        packed = io.BytesIO()
        with between_updates(self._learner, POLL_S) as is_between:
            if not is_between:
                return  # an update is in progress: try again later
            step = self._learner.stats.step
            contents = {"step": step, "model_state_dict": self._learner.model.state_dict()}
            torch.save(contents, packed)
        write_whole(self._weights, packed.getbuffer())
        self._is_playing = True
        self._plan_next()

    def _plan_next(self) -> None:
        every = self._flags.eval_every
        self._next_at = (self._learner.stats.step // every + 1) * every

    def _take_in(self) -> None:
        """Read and report the process's result, if there is one."""
        if not self._result.exists():
            return
        result = json.loads(self._result.read_text())
        self._result.unlink()
        self._is_playing = False
        returns = result["returns"]
        mean = float(np.mean(returns))
        self._learner.stats.observe({"eval_return": mean, "eval_step": result["step"]})
        logger.info(
            "Evaluation of step %s: mean return %.2f over %d episodes, from %.2f to %.2f.",
            f"{result['step']:,}", mean, len(returns), min(returns), max(returns),
        )  # fmt: skip

    def _remove_files(self) -> None:
        for path in (self._weights, self._result):
            path.unlink(missing_ok=True)


# ------------------------------------------------------------------------------ the second process


def play_as_asked(flags: TrainingFlags, line: SupervisorLine) -> None:
    """Play episodes whenever there are new weights, until the training process ends this one."""
    weights = flags.rundir / WEIGHTS

    def warn(text: str) -> None:
        line.send(logging.WARNING, text)

    while True:
        while not weights.exists():
            line.tick()
            time.sleep(POLL_S)
        contents = load(weights)
        returns = []
        # The same seeds each time, so that results differ by the weights alone.
        with Player(flags, flags.eval_episodes, derive_seed(flags.seed, SEEDS)) as player:
            player.model.load_state_dict(contents["model_state_dict"])
            returns += [episode.episode_return for episode in player.play(line.tick, warn)]
        result = {"step": contents["step"], "returns": returns}
        weights.unlink()
        write_whole(flags.rundir / RESULT, memoryview(json.dumps(result).encode()))


def as_flags(values: dict[str, Any]) -> TrainingFlags:
    """TrainingFlags from the result of `as_plain_dict`, without other flags that are in it."""
    known = {field.name for field in dataclasses.fields(TrainingFlags)}
    values = {name: value for name, value in values.items() if name in known}
    return TrainingFlags(**{**values, "savedir": Path(values["savedir"])})


def main(text: str) -> None:
    values = json.loads(text)
    line = SupervisorLine(values["line"])
    os.nice(NICENESS)
    torch.set_num_threads(1)
    try:
        user_code.unpack(line.data)
        play_as_asked(as_flags(values["flags"]), line)
    except Exception as error:
        line.send(logging.WARNING, describe_failure(error))
        sys.stderr.flush()
        os._exit(1)  # without waiting for threads that environments have left


if __name__ == "__main__":
    main(sys.argv[1])
