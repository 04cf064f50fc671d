"""Why a run makes no step: what is said names what is waited for."""

import contextlib
import re
from types import SimpleNamespace

import pytest

from tests.helpers import training
from torchbeast.core import work_log
from torchbeast.core.stats import RunningStats
from torchbeast.run import stall
from torchbeast.run.stall import Stall


class Watched:
    """A stall whose clock, steps and rollouts are set by hand."""

    def __init__(self, monkeypatch):
        for module in (stall, work_log):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.now, self.steps, self.rollouts, self.late = 100.0, 1000, 0, []
        self.stats = RunningStats()
        self.stall = Stall(
            self.stats,
            late=lambda: self.late,
            count_steps=lambda: self.steps,
            count_rollouts=lambda: (self.rollouts, 32),
        )

    def explain(self, seconds=12.0):
        self.now += seconds
        self.stall.poll()
        return self.stall.explain(seconds)


@pytest.fixture
def run(monkeypatch):
    return Watched(monkeypatch)


def test_slow_environments_are_named_with_what_they_have_done(run):
    run.steps, run.rollouts = 1096, 3
    assert run.explain() == (
        "waiting for environments, which do not hang: 96 steps were played meanwhile, and 3 of 32 "
        "rollouts are there for an update."
    )
    run.stats.step = 640
    run.stall.poll()
    assert "0 steps were played meanwhile" in run.explain()


def test_an_update_that_takes_long_is_named_with_its_time(run):
    run.late = ["clients that dial in at 127.0.0.1:4242"]
    with run.stats.work["learner"].at_work():
        run.now += 1
        assert run.explain() == "an update has been under way for 12 s."
    assert run.stall.explain(13.0).startswith("waiting for clients that dial in")


def test_an_update_that_has_just_begun_is_not_to_blame(run):
    run.explain(11.0)
    with run.stats.work["learner"].at_work():
        run.now += 1
        assert run.stall.explain(12.0).startswith("waiting for environments")


def test_an_agent_that_computes_all_the_time_is_named(run):
    agent = run.stats.work["inference"]
    with agent.at_work():
        run.now += 9
    run.now += 1
    run.steps += 4
    assert run.stall.explain(10.0) == (
        "waiting for the agent, which computes actions for 90% of the time; 4 steps were played "
        "meanwhile."
    )
    run.stats.step = 640
    run.stall.poll()
    assert run.explain().startswith("waiting for environments")
    with agent.at_work():
        assert run.explain(24.0).startswith("waiting for the agent, which computes actions for 67%")


def test_batches_that_teach_nothing_are_named(run):
    for _ in range(3):
        with run.stats.work["learner"].at_work():
            run.now += 1
    assert run.explain() == (
        "nothing could be learnt from the last batches, 3 so far; see dropped_rollouts and "
        "skipped_updates."
    )


def test_those_that_are_late_are_named_up_to_a_number(run):
    run.late = [f"Worker {i} (busy)" for i in range(6)]
    named = ", ".join(run.late[: stall.MAX_NAMED])
    assert run.explain() == f"waiting for {named}, 2 more."


def test_work_ends_also_with_an_error(run):
    work = run.stats.work["learner"]
    with contextlib.suppress(ValueError), work.at_work():
        raise ValueError
    assert (work.num_done, work.num_running, work.running_s) == (1, 0, 0.0)


NOTICES = {
    ("Slow", "mlp"): r"waiting for {who}, which do not hang: [1-9]\d* steps were played meanwhile",
    ("Quick", "SlowLearner"): r"an update has been under way for 1?\d s",
    ("Quick", "SlowAgent"): r"waiting for the agent, which computes actions for \d+% of the time",
}
CASES = [("polybeast", *case) for case in NOTICES] + [("monobeast", *c) for c in [*NOTICES][:2]]


@pytest.mark.slow
@pytest.mark.timeout(training.TIMEOUT_S + 60)
@pytest.mark.parametrize(("beast", "env", "model"), CASES)
def test_a_run_says_what_is_slow(tmp_path, beast, env, model):
    helpers = "tests.helpers.slow_tasks"
    args = ("--env", f"{helpers}:{env}", "--unroll_length", "40", "--batch_size", "4")
    args += () if model == "mlp" else ("--model", f"{helpers}:{model}")
    with training.Training(beast, tmp_path, *args) as run:
        who = "environments" if beast == "polybeast" else "actors"
        text = r"No step for \d+ s: " + NOTICES[env, model].format(who=who)
        # Not the first notice, perhaps: on a busy machine workers are waited for to start.
        run.wait_for(lambda: re.search(text, run.output), "notice")
