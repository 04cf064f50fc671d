"""Play episodes with a trained agent: the modes test and test_render of both beasts."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch

from libtorchbeast.environments import spec_of_group
from libtorchbeast.tree import map_tree
from torchbeast.envs import REMOTE, make_envs
from torchbeast.errors import UsageError
from torchbeast.models import as_output, build_model
from torchbeast.run import checkpoint
from torchbeast.run.flags import TrainingFlags


def evaluate(flags: TrainingFlags) -> list[float]:
    """Print and return the returns of `num_episodes` episodes with the newest checkpoint."""
    path, contents = checkpoint.load_or_fall_back(flags.rundir / flags.checkpoint)
    if flags.env == REMOTE:
        raise UsageError(
            f"The agent in {path} was trained on environments that dialled in; name one to play "
            "with --env."
        )
    options = dataclasses.replace(flags.env_options, episodic_life=False)  # whole games
    print(f"Playing {flags.env} with {path}")
    render = flags.mode == "test_render"
    envs = make_envs(options, num_envs=1, seed=flags.seed, render=render)
    video = Video(flags.rundir / "test.mp4", envs) if render else None
    try:
        row = envs.reset()
        model = build_model(flags, spec_of_group(envs, row))
        remedy = "leave out --env to play what it was trained on"
        checkpoint.load_model(path, contents, model, flags.env, remedy)
        model.eval()
        returns = _play(model, envs, row, flags.num_episodes, video)
    finally:
        envs.close()
        if video is not None:
            video.close()
    print(f"Mean return over {len(returns)} episodes: {np.mean(returns):.2f}")
    if video is not None:
        print(f"Video: {video.path}")
    return returns


@torch.inference_mode()
def _play(
    model: Any, envs: Any, row: dict[str, Any], num_episodes: int, video: "Video | None"
) -> list[float]:
    state = model.initial_state(batch_size=1)
    returns: list[float] = []
    while len(returns) < num_episodes:
        inputs = map_tree(lambda array: torch.from_numpy(array).unsqueeze(0), row)
        output, state = model(inputs, state)
        row = envs.step(as_output(output)["action"][0].long().numpy())
        if video is not None:
            video.add()
        if row["done"][0] and row["episode_step"][0] > 0:
            returns.append(float(row["episode_return"][0]))
            print(
                f"Episode {len(returns)}: return {returns[-1]:.2f} "
                f"in {row['episode_step'][0]} steps",
                flush=True,
            )
    return returns


class Video:
    """What the first of `envs` renders, as an MP4 file at the environment's own speed."""

    FRAMES_PER_S = 15.0  # of those that do not say

    def __init__(self, path: Path, envs: Any) -> None:
        if not hasattr(envs, "envs"):
            raise UsageError("A VectorEnv cannot be filmed; use --mode test.")
        self.path = path
        self._env = envs.envs[0]
        metadata = getattr(self._env, "metadata", None) or {}
        self._frames_per_s = float(metadata.get("render_fps") or self.FRAMES_PER_S)
        self._writer: Any = None

    def add(self) -> None:
        import cv2

        if getattr(self._env, "render_mode", None) is None:
            raise UsageError(
                f"{self._env} must render to rgb_array for --mode test_render; use --mode test."
            )
        image = self._env.render()
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
