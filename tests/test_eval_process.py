"""Playing with a trained agent, also while it trains."""

import dataclasses
import os
import signal
import threading

import pytest

from tests.helpers.training import TIMEOUT_S, Training, read_logs
from tests.test_learner import make_learner
from torchbeast import user_code
from torchbeast.errors import UsageError
from torchbeast.run import evaluate
from torchbeast.run.eval_process import Evaluation
from torchbeast.run.evaluate import Player
from torchbeast.run.flags import TrainingFlags


def returns_of(env, num_episodes, **flags):
    flags = TrainingFlags(env=f"tests.helpers.uneven:{env}", model="mlp", **flags)
    with Player(flags, num_episodes, seed=1) as player:
        return [episode.episode_return for episode in player.play()]


@pytest.mark.parametrize("num_episodes", [1, 5, 16, 61])
def test_as_many_episodes_as_asked_for_are_played(num_episodes):
    assert len(returns_of("PaysItsAction", num_episodes)) == num_episodes


def test_short_episodes_do_not_count_more_often_than_long_ones():
    returns = returns_of("Uneven", 160)
    assert 0.35 < sum(returns) / 160 < 0.65  # of those that end first, nearly all are short


def test_actions_are_drawn_only_if_asked_for():
    assert len(set(returns_of("PaysItsAction", 50))) == 1
    assert 10 < sum(returns_of("PaysItsAction", 50, sample_actions=True)) < 40


def test_without_evaluation_the_model_need_not_be_sent_to_a_process(tmp_path):
    flags = TrainingFlags(env="Catch", savedir=tmp_path, xpid="run")
    with user_code.offer({"__main__:Model": threading.Lock()}):  # cannot be sent
        with Evaluation(flags, make_learner()):
            pass
        with pytest.raises(UsageError, match="cannot be handed to other processes"):
            Evaluation(dataclasses.replace(flags, eval_every=1000), make_learner()).__enter__()


# --- While training -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.parametrize("beast", ["monobeast", "polybeast"])
def test_the_agent_is_evaluated_while_it_trains(beast, tmp_path):
    args = ("--env", "Catch", "--eval_every", "2000", "--total_steps", "100000000")
    with Training(beast, tmp_path, *args) as training:
        training.wait_for(lambda: training.output.count("Evaluation of step") >= 2, "evaluation")
        # Killed, it is restarted, and goes on.
        (evaluator,) = [
            process
            for process in training.family()
            if "torchbeast.run.eval_process" in process.cmdline()
        ]
        evaluator.kill()
        training.wait_for(lambda: "Evaluation was killed by SIGKILL" in training.output, "restart")
        number = training.output.count("Evaluation of step")
        training.wait_for(
            lambda: training.output.count("Evaluation of step") > number + 1, "more evaluations"
        )
        training.stop(signal.SIGTERM, 0)
    rows = [row for row in read_logs(training.folder) if row["eval_return"]]
    assert len(rows) >= 2
    for row in rows:
        assert -1 <= float(row["eval_return"]) <= 1
        assert 2000 <= float(row["eval_step"]) <= int(row["step"])
    assert not list(training.folder.glob("eval-*"))


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.parametrize(
    ("trouble", "sign"),
    [
        ("raise ValueError('only here')", "ValueError: only here"),
        ("print('falling asleep', flush=True); time.sleep(1e6)", "Evaluation prints something"),
    ],
)
def test_an_evaluation_that_fails_or_hangs_does_not_touch_the_training(tmp_path, trouble, sign):
    (tmp_path / "troubled.py").write_text(
        "import os, sys, time\n"
        "from torchbeast.envs.toys import Catch\n"
        "def make():\n"
        "    if 'eval_process' in sys.argv[0]:\n"
        f"        {trouble}\n"
        "    return Catch()\n"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    args = ("--env", "troubled:make", "--eval_every", "1000", "--total_steps", "100000000")
    with Training("polybeast", tmp_path, *args, env=env) as training:
        training.wait_for(lambda: sign in training.output, "trouble")
        training.wait_for_step(training.step + 5000)
        assert training.end(signal.SIGTERM) == 0


@pytest.mark.parametrize("sample", [False, True])
def test_episodes_that_never_end_are_reported(monkeypatch, sample):
    class Enough(Exception):
        pass

    def warn(text):
        texts.append(text)
        if len(texts) == 3:
            raise Enough

    texts = []
    monkeypatch.setattr(evaluate, "SAY_S", 0.0)
    monkeypatch.setattr(evaluate, "SAY_AGAIN_S", 0.0)
    flags = TrainingFlags(env="tests.helpers.tasks:Endless", sample_actions=sample)
    with Player(flags, 2, seed=1) as player, pytest.raises(Enough):
        list(player.play(warn=warn))
    assert texts[0].startswith("No episode has ended for 0 s, 1 steps of each environment.")
    assert ("--sample_actions draws them." in texts[0]) is not sample
