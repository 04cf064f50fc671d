"""The row: what an environment says at each step, and the rule for ends of episodes.

`done` on a row: its frame is the first of a new episode; reward, episode_step and episode_return on
that row belong to the episode that just ended. `truncated` on a row: the transition into it did not
happen. A time limit therefore gives an ordinary row with the true final frame, then one extra row
with the reset frame, `done` and `truncated` set, whose action the environment ignored.
A row with `done` and episode_step 0 ends no episode: the first row of all, or a lost life.
"""

from typing import Any, Protocol

import numpy as np

Row = dict[str, Any]
"""`frame` (array or tree of arrays) and the fields below, each with num_envs as first dimension."""

FIELD_DTYPES = {
    "reward": np.float32,
    "done": np.bool_,
    "truncated": np.bool_,
    "episode_step": np.int32,
    "episode_return": np.float32,
    "last_action": np.int64,
}


class Environments(Protocol):
    """A group of environments that step together."""

    num_envs: int
    num_actions: int

    def reset(self) -> Row:
        """Start an episode in each; call once, before the first step."""

    def step(self, actions: np.ndarray) -> Row:
        """Take one action [num_envs] in each; episodes that end start anew by themselves."""

    def close(self) -> None: ...


class EpisodeCounter:
    """Counts steps and sums rewards of each environment's episode, and makes the rows."""

    def __init__(self, num_envs: int) -> None:
        self._steps = np.zeros(num_envs, np.int32)
        self._returns = np.zeros(num_envs, np.float64)

    def first_row(self, frame: Any) -> Row:
        """The row before any step: `done`, and nothing ended."""
        num_envs = len(self._steps)
        row: Row = {name: np.zeros(num_envs, dtype) for name, dtype in FIELD_DTYPES.items()}
        row["frame"] = frame
        row["done"][:] = True
        return row

    def row(
        self,
        frame: Any,
        reward: np.ndarray,
        done: np.ndarray,
        truncated: np.ndarray,
        last_action: np.ndarray,
        ended: np.ndarray | None = None,
    ) -> Row:
        """The row after a step. `ended` (default: `done`) is where the whole episode is over."""
        ended = done if ended is None else ended
        self._steps += ~truncated  # the extra row is no step
        self._returns += reward
        row = {
            "frame": frame,
            "reward": reward.astype(np.float32),
            "done": done,
            "truncated": truncated,
            "episode_step": np.where(done & ~ended, 0, self._steps).astype(np.int32),
            "episode_return": self._returns.astype(np.float32),
            "last_action": np.asarray(last_action, np.int64),
        }
        self._steps[ended] = 0
        self._returns[ended] = 0.0
        return row
