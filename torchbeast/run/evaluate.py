"""Play episodes with a trained agent: the modes test and test_render of both beasts."""

import dataclasses
import functools
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from libtorchbeast.groups import spec_of_group
from libtorchbeast.old_gym import takes_keyword
from libtorchbeast.tree import map_tree
from libtorchbeast.wait_notice import SAY_AGAIN_S, SAY_S
from torchbeast.envs import REMOTE, make_envs
from torchbeast.errors import UsageError
from torchbeast.models import as_output, build_model
from torchbeast.run import checkpoint
from torchbeast.run.flags import TrainingFlags
from torchbeast.runtime.inference_model import prepare_to_act
from torchbeast.runtime.threads import cpu_threads

logger = logging.getLogger("torchbeast")

MAX_ENVS = 16  # environments that play at once


def evaluate(flags: TrainingFlags) -> list[float]:
    """Print and return the returns of `num_episodes` episodes with the run's --checkpoint."""
    path, contents = checkpoint.load_or_fall_back(flags.rundir / flags.checkpoint)
    if flags.env == REMOTE:
        raise UsageError(
            f"The agent in {path} was trained on environments that dialled in; name one to play "
            "with --env."
        )
    how = "actions drawn from its policy" if flags.sample_actions else "its most likely actions"
    print(f"Playing {flags.env} with {path} and {how}")
    returns: list[float] = []
    by_agent: dict[str, list[float]] = defaultdict(list)  # of games of several agents
    with (
        cpu_threads(1),
        Player(flags, flags.num_episodes, flags.seed, flags.mode == "test_render") as player,
    ):
        remedy = "leave out --env to play what it was trained on"
        checkpoint.load_model(path, contents, player.model, flags.env, remedy)
        for episode_return, length, agent in player.play():
            returns.append(episode_return)
            if agent:
                by_agent[agent].append(episode_return)
            who = f" ({agent})" * bool(agent)
            text = f"return {episode_return:.2f} in {length} steps"
            print(f"Episode {len(returns)}{who}: {text}", flush=True)
    for agent, own in sorted(by_agent.items()):
        print(f"Mean return of {agent} over {len(own)} episodes: {np.mean(own):.2f}")
    print(f"Mean return over {len(returns)} episodes: {np.mean(returns):.2f}")
    if player.video is not None:
        print(f"Video: {player.video.path}")
    return returns


class Episode(NamedTuple):
    episode_return: float
    length: int
    agent: str
    """The agent's name in a game of several agents, else empty."""


class Player:
    """An agent that plays a number of episodes in many environments at once. A context manager.

    Each environment plays a fixed share of the episodes: if the first to end counted, short ones
    would count more often than long ones.
    """

    def __init__(
        self, flags: TrainingFlags, num_episodes: int, seed: int, render: bool = False
    ) -> None:
        """`model` has random weights until the caller loads trained ones."""
        num_envs = 1 if render else min(num_episodes, MAX_ENVS)
        options = dataclasses.replace(flags.env_options, episodic_life=False)  # whole games
        torch.manual_seed(seed)  # for sampled actions
        self._envs = make_envs(options, num_envs, seed=seed, render=render, whole_games=True)
        # With several agents, each game plays its share: one episode for each of its agents.
        num_agents = getattr(self._envs, "num_agents", 1)
        num_games = self._envs.num_envs // num_agents
        self._agents = getattr(self._envs, "agents", [""])
        shares = [len(range(i, num_episodes, num_games)) for i in range(num_games)]
        self._shares = [share for share in shares for _ in range(num_agents)]
        self.video: Video | None = None
        try:
            if render:
                self.video = Video(flags.rundir / "test.mp4", self._envs)
            self._row = self._envs.reset()
            self.model = build_model(flags, spec_of_group(self._envs, self._row))
        except BaseException:
            self._envs.close()
            raise
        self._samples_actions = flags.sample_actions
        prepare_to_play(self.model, flags.sample_actions)

    @torch.inference_mode()
    def play(
        self,
        on_step: Callable[[], object] = lambda: None,
        warn: Callable[[str], object] = logger.warning,
    ) -> Iterator[Episode]:
        """Yield each episode when it ends; call `warn` if none has ended for a while."""
        left = list(self._shares)
        ended_at, warn_at, num_steps = time.monotonic(), SAY_S, 0
        row, state = self._row, self.model.initial_state(batch_size=len(left))  # type: ignore
        while any(left):
            inputs = map_tree(lambda array: torch.from_numpy(array).unsqueeze(0), row)
            output, state = self.model(inputs, state)
            row = self._envs.step(map_tree(lambda x: x[0].numpy(), as_output(output)["action"]))
            on_step()
            num_steps += 1
            if (waited_s := time.monotonic() - ended_at) >= warn_at:
                warn_at = waited_s + SAY_AGAIN_S
                warn(self._describe_wait(waited_s, num_steps))
            if self.video is not None:
                self.video.add()
            ended = row["done"] & (row["episode_step"] > 0)
            if ended.any():
                ended_at, warn_at, num_steps = time.monotonic(), SAY_S, 0
            for i in np.flatnonzero(ended):
                if left[i]:
                    agent = self._agents[i % len(self._agents)]
                    yield Episode(
                        float(row["episode_return"][i]), int(row["episode_step"][i]), agent
                    )
            for i in np.flatnonzero(getattr(self._envs, "game_over", ended)):
                left[i] = max(0, left[i] - 1)

    def _describe_wait(self, seconds: float, num_steps: int) -> str:
        text = f"No episode has ended for {seconds:.0f} s, {num_steps:,} steps of each environment"
        if self._samples_actions:
            return f"{text}."
        return (
            f"{text}. With its most likely actions an agent may do the same for ever; "
            "--sample_actions draws them."
        )

    def __enter__(self) -> "Player":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._envs.close()
        if self.video is not None:
            self.video.close()


def prepare_to_play(model: nn.Module, sample_actions: bool) -> None:
    """Let a model sample its actions, or take the most likely ones."""
    if sample_actions:
        prepare_to_act(model)
    else:
        model.eval()


class Video:
    """Writes what the first of `envs` renders to an MP4 file, at the environment's own speed."""

    FRAMES_PER_S = 15.0  # for environments that do not say

    def __init__(self, path: Path, envs: Any) -> None:
        if not hasattr(envs, "envs"):
            raise UsageError("A VectorEnv cannot be filmed; use --mode test.")
        self.path = path
        self._env = envs.envs[0]
        metadata = getattr(self._env, "metadata", None) or {}
        given = metadata.get("render_fps") or metadata.get("video.frames_per_second")
        self._frames_per_s = float(given or self.FRAMES_PER_S)
        self._writer: Any = None
        self._render: Callable[[], Any] = lambda: None  # for environments that cannot render
        render: Any = getattr(self._env, "render", None)
        if getattr(self._env, "render_mode", None) is not None:
            self._render = render
        elif takes_keyword(render, "mode"):  # old Gym's
            self._render = functools.partial(render, mode="rgb_array")

    def add(self) -> None:
        import cv2

        image = self._render()
        if not isinstance(image, np.ndarray):
            name = type(getattr(self._env, "unwrapped", self._env)).__name__
            raise UsageError(
                f"{name} must render to rgb_array for --mode test_render, got "
                f"{type(image).__name__}; use --mode test."
            )
        if self._writer is None:
            size = (image.shape[1], image.shape[0])
            codec = cv2.VideoWriter.fourcc(*"mp4v")
            self._writer = cv2.VideoWriter(str(self.path), codec, self._frames_per_s, size)
            if not self._writer.isOpened():
                raise RuntimeError(f"OpenCV cannot write a video to {self.path}.")
        self._writer.write(cv2.cvtColor(image, cv2.COLOR_RGB2BGR))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.release()
