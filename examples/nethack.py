"""NetHack: a model of your own for a dict observation, with an LSTM.

pip install nle
python examples/nethack.py

nle's wheel requires one version of Gymnasium; `pip install --no-deps nle` leaves yours as it is.
"""

from typing import Any

import gymnasium
import torch
import tyro
from gymnasium import spaces
from torch import Tensor, nn

import torchbeast
from torchbeast.models import unroll_lstm

KEYS = ("chars", "blstats", "message")


class Some(gymnasium.ObservationWrapper):
    """Keeps some parts of the observation: the map, the status line's numbers, the message."""

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        seen: Any = env.observation_space
        self.observation_space = spaces.Dict({key: seen[key] for key in KEYS})

    def observation(self, observation: dict[str, Any]) -> dict[str, Any]:
        return {key: observation[key] for key in KEYS}


def make(name: str = "NetHackScore-v0") -> gymnasium.Env:
    import nle  # noqa: F401 (registers its environments, in each process that makes one)

    return Some(gymnasium.make(name, disable_env_checker=True))


class Net(nn.Module):
    """Embedded characters, convolutions over the map, and an LSTM."""

    def __init__(self, observation_space: spaces.Dict, action_space: spaces.Discrete) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 16)
        self.convs = nn.Sequential(
            *(nn.Conv2d(16, 32, 3, stride=2), nn.ELU(), nn.Conv2d(32, 32, 3, stride=2), nn.ELU()),
            nn.Flatten(),
        )
        height, width = observation_space["chars"].shape  # type: ignore[misc]
        num_seen = self.convs(torch.zeros(1, 16, height, width)).shape[1]
        num_stats = observation_space["blstats"].shape[0]  # type: ignore[index]
        self.stats = nn.Sequential(nn.Linear(num_stats, 64), nn.ELU())
        self.lstm = nn.LSTM(num_seen + 64 + 16, 256)
        self.policy = nn.Linear(256, int(action_space.n))
        self.baseline = nn.Linear(256, 1)

    def initial_state(self, batch_size: int = 1) -> tuple[Tensor, ...]:
        return tuple(torch.zeros(1, batch_size, 256) for _ in range(2))

    def forward(self, inputs: dict[str, Any], state: tuple[Tensor, ...]) -> Any:
        frame, done = inputs["frame"], inputs["done"]  # [T, B, ...], all of them
        T, B = done.shape
        chars = self.embed(frame["chars"].flatten(0, 1).long())  # [T*B, 21, 79, 16]
        stats = frame["blstats"].flatten(0, 1).float()
        seen = [
            self.convs(chars.permute(0, 3, 1, 2)),
            self.stats(torch.sign(stats) * torch.log1p(stats.abs())),
            self.embed(frame["message"].flatten(0, 1).long()).mean(dim=1),
        ]
        features = torch.cat(seen, dim=1).view(T, B, -1)
        core, state = unroll_lstm(self.lstm, features, done, state)  # zeroed where `done` is set
        logits = self.policy(core)  # [T, B, number of actions]
        drawn = torch.distributions.Categorical(logits=logits).sample()
        action = drawn if self.training else logits.argmax(-1)
        baseline = self.baseline(core)[..., 0]  # [T, B]
        return {"policy_logits": logits, "baseline": baseline, "action": action}, state


def main(total_steps: int = 10_000_000, savedir: str = "~/logs/torchbeast") -> None:
    options: dict[str, Any] = {"reward_clipping": "abs_one", "learning_rate": 0.0003}
    run = torchbeast.train(make, Net, total_steps=total_steps, savedir=savedir, **options)
    print(f"{run.rundir}: mean return {run.figures.get('mean_episode_return')}")


if __name__ == "__main__":
    tyro.cli(main)
