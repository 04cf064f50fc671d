"""Environments in examples/: a board game with masks, a game of several agents, a simulator."""

import subprocess
import sys

import numpy as np
import pytest

from examples.tic_tac_toe import LINES, TicTacToe
from tests.helpers.training import ROOT, TIMEOUT_S, Training, learn, mean_return

LIMIT = pytest.mark.timeout(TIMEOUT_S + 60)


def test_tic_tac_toe_masks_the_fields_that_are_taken():
    env = TicTacToe()
    random = np.random.default_rng(0)
    outcomes = set()
    for game in range(60):
        board, info = env.reset(seed=game)
        over = False
        while not over:
            assert np.array_equal(info["action_mask"], board == 0)
            move = int(random.choice(np.flatnonzero(info["action_mask"])))
            board, reward, over, _, info = env.step(move)
        lines = board[LINES].sum(axis=1)
        assert reward == (3 in lines) - (-3 in lines)
        outcomes.add(reward)
    assert outcomes == {-1.0, 0.0, 1.0}
    with pytest.raises(ValueError, match="is taken"):
        env.step(int(np.flatnonzero(board)[0]))


@pytest.mark.slow
@LIMIT
def test_tic_tac_toe_is_mostly_won(tmp_path):
    args = ("--env", "examples.tic_tac_toe:TicTacToe", "--total_steps", "300000")
    learn("polybeast", tmp_path, 0.75, *args)  # at random about 0
    assert "rebuilt" not in (tmp_path / "output").read_text()  # it raises at a masked action


def test_the_meeting_is_a_game_by_pettingzoos_own_rules():
    pytest.importorskip("pettingzoo")
    from pettingzoo.test import parallel_api_test

    from examples.pettingzoo_meeting import Meeting

    parallel_api_test(Meeting(), num_cycles=100)


@pytest.mark.slow
@LIMIT
def test_agents_of_a_pettingzoo_game_learn_to_meet(tmp_path):
    pytest.importorskip("pettingzoo")
    args = ("--env", "examples.pettingzoo_meeting:Meeting", "--total_steps", "300000")
    learn("monobeast", tmp_path, 0.7, *args)  # at random -0.3, at best about 0.9
    assert "rebuilt" not in (tmp_path / "output").read_text()


@pytest.mark.slow
@LIMIT
def test_a_simulator_with_a_box_as_action_dials_in_and_teaches(tmp_path):
    # At a socket the rows go through shared memory, which leaves the time to learning.
    address = f"unix:{tmp_path}/socket"
    args = ("--env", "remote", "--listen", address, "--total_steps", "1000000")
    with Training("polybeast_learner", tmp_path, *args) as training:
        program = [sys.executable, str(ROOT / "examples" / "aim_simulator.py"), "--connect"]
        simulators = [
            subprocess.Popen([*program, address, "--seed", str(i)], cwd=ROOT) for i in range(4)
        ]
        try:
            # Of 10; at first about 1.
            training.wait_for(lambda: mean_return(training) > 4, "mean return above 4")
            assert all(simulator.poll() is None for simulator in simulators)
        finally:
            for simulator in simulators:
                simulator.kill()
                simulator.wait(10)
