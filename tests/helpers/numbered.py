"""Environments that number their steps, and checks that no step was lost, doubled or torn."""

import itertools
import os
import subprocess
import time
from pathlib import Path

import numpy as np

from libtorchbeast.tree import map_tree

EPISODE_STEPS = 17
FRAME_SIZE = 20_000  # large enough to be caught in the middle of writing
NUM_ACTIONS = 5


class NumberedEnvs:
    """Each frame is its step's number, everywhere; the reward is the action."""

    _ids = itertools.count()

    def __init__(self, num_envs: int, seed: int, step_s: float = 0.0, build_s: float = 0.0) -> None:
        time.sleep(build_s)
        self.num_envs = num_envs
        self._step = 0
        self._step_s = step_s
        first = (os.getpid() * 1000 + next(self._ids)) * 1000
        self._ids_of_envs = np.arange(first, first + num_envs)

    def reset(self):
        return self._row(np.zeros(self.num_envs, np.int64))

    def step(self, actions):
        self._step += 1
        if self._step_s:
            time.sleep(self._step_s)
        return self._row(actions)

    def close(self):
        pass

    def _row(self, actions):
        done = np.full(self.num_envs, self._step % EPISODE_STEPS == 0)
        number = np.full(self.num_envs, self._step, np.int32)
        return {
            "frame": {
                "id": self._ids_of_envs,
                "step": np.repeat(number[:, None], FRAME_SIZE, axis=1),
            },
            "reward": actions.astype(np.float32),
            "done": done,
            "episode_step": number % EPISODE_STEPS,
            "episode_return": np.zeros(self.num_envs, np.float32),
            "truncated": np.zeros(self.num_envs, bool),
            "last_action": actions.copy(),
        }


class BreakingEnvs(NumberedEnvs):
    """Raise, exit or hang at a step."""

    def __init__(self, num_envs: int, seed: int, break_at: int, how: str) -> None:
        super().__init__(num_envs, seed)
        self._break_at = break_at
        self._how = how

    def step(self, actions):
        if self._step == self._break_at:
            if self._how == "raise":
                raise ValueError("the simulator is out of tea")
            if self._how == "exit":
                os._exit(3)
            time.sleep(1000)
        return super().step(actions)


class StartingEnvs(NumberedEnvs):
    """Has a program of its own running beside it."""

    def __init__(self, num_envs: int, seed: int, marker: str) -> None:
        super().__init__(num_envs, seed)
        child = subprocess.Popen(["sleep", "1000"])
        if not Path(marker).exists():
            Path(marker).write_text(str(child.pid))


class Checker:
    """Looks at every batch `((rows, outputs), state)` that comes out of an actor pool."""

    def __init__(self, unroll_length: int) -> None:
        self.num_transitions = 0
        self.num_padded = 0
        self._unroll_length = unroll_length
        self._ends: dict[int, tuple[int, int]] = {}  # of each environment: last step and version

    def check(self, batch) -> None:
        (rows, outputs), (state,) = batch
        rows = map_tree(lambda tensor: tensor.numpy(), rows)
        frame, reward, last_action = rows["frame"], rows["reward"], rows["last_action"]
        done, truncated = rows["done"], rows["truncated"]
        action, version = outputs["action"].numpy(), outputs["version"].numpy()
        assert len(done) == self._unroll_length + 1
        step = frame["step"][..., 0]  # [T+1, B]
        assert (frame["step"] == step[..., None]).all(), "a torn row"
        did_happen = ~truncated[1:]
        assert (did_happen[:-1] >= did_happen[1:]).all(), "padding stands at the end"
        assert done[1:][~did_happen].all()
        assert (step[1:] == step[:-1] + 1)[did_happen].all(), "a step lost or doubled"
        assert (frame["id"][1:] == frame["id"][:-1])[did_happen].all(), "rows of two environments"
        assert (done == (step % EPISODE_STEPS == 0))[1:][did_happen].all()
        expected = step[:-1] % NUM_ACTIONS  # what the agent answers to the row before
        assert (action[1:] == expected)[did_happen].all(), "output t must lead to row t"
        assert (reward[1:] == expected)[did_happen].all()
        assert (last_action[1:] == expected)[did_happen].all()
        assert (version[1:] >= version[:-1])[did_happen].all(), "weights went back"
        self._check_states(state.numpy()[0, :, 0], step[0])
        self._check_continuation(frame["id"][0], step, version, did_happen)
        self.num_transitions += int(did_happen.sum())
        self.num_padded += int((~did_happen[-1]).sum())

    @staticmethod
    def _check_states(seen, step) -> None:
        """At row 0 the memory holds how many rows of the episode came before it."""
        inside = step % EPISODE_STEPS
        last = np.where(step == 0, 0, EPISODE_STEPS)  # the end of an episode, not yet forgotten
        assert (seen == np.where(inside == 0, last, inside)).all(), (
            "the agent's state is not row 0's"
        )

    def _check_continuation(self, ids, step, version, did_happen) -> None:
        """A rollout begins with the row and the version that the one before ended with."""
        for column, env in enumerate(ids):
            first = int(step[0, column])
            if env in self._ends:
                assert (first, int(version[0, column])) == self._ends[env], "rollouts out of order"
            else:
                assert first == 0, "an environment's first rollout begins at its first row"
            length = int(did_happen[:, column].sum())
            self._ends[int(env)] = (int(step[length, column]), int(version[length, column]))


def answer(row, state, version):
    """The agent that `Checker` expects."""
    import torch

    action = row["frame"]["step"][..., 0].long() % NUM_ACTIONS  # [1, B]
    (seen,) = state  # [1, B, 1]
    seen = torch.where(row["done"].unsqueeze(-1), torch.zeros_like(seen), seen) + 1
    return {"action": action, "version": torch.full_like(action, version)}, (seen,)
