"""Stable-Baselines3 with the settings of its zoo; writes a curve until it is ended.

Run by `benchmarks/scoreboard.py`, in a virtual environment of its own.
"""

import argparse
import csv
import time
from typing import Any

import ale_py
import gymnasium
import torch
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.sb2_compat.rmsprop_tf_like import RMSpropTFLike
from stable_baselines3.common.vec_env import SubprocVecEnv, VecFrameStack, VecNormalize

gymnasium.register_envs(ale_py)

RMSPROP = {"optimizer_class": RMSpropTFLike, "optimizer_kwargs": {"eps": 1e-5}}
# As rl-baselines3-zoo has them: environments, steps in all (to which rates are annealed), the rest.
SETTINGS: dict[tuple[str, str], dict[str, Any]] = {
    ("ppo", "atari"): {
        "n_envs": 8,
        "total": 10_000_000,
        "n_steps": 128,
        "n_epochs": 4,
        "batch_size": 256,
        "learning_rate": 2.5e-4,
        "clip_range": 0.1,
        "vf_coef": 0.5,
        "ent_coef": 0.01,
        "anneal": True,
    },
    ("a2c", "atari"): {
        "n_envs": 16,
        "total": 10_000_000,
        "ent_coef": 0.01,
        "vf_coef": 0.25,
        "policy_kwargs": RMSPROP,
    },
    ("ppo", "CartPole-v1"): {
        "n_envs": 8,
        "total": 100_000,
        "n_steps": 32,
        "batch_size": 256,
        "gae_lambda": 0.8,
        "gamma": 0.98,
        "n_epochs": 20,
        "ent_coef": 0.0,
        "learning_rate": 0.001,
        "clip_range": 0.2,
        "anneal": True,
    },
    ("a2c", "CartPole-v1"): {"n_envs": 8, "total": 500_000, "ent_coef": 0.0},
    ("ppo", "LunarLander-v3"): {
        "n_envs": 16,
        "total": 1_000_000,
        "n_steps": 1024,
        "batch_size": 64,
        "gae_lambda": 0.98,
        "gamma": 0.999,
        "n_epochs": 4,
        "ent_coef": 0.01,
    },
    ("a2c", "LunarLander-v3"): {
        "n_envs": 8,
        "total": 200_000,
        "gamma": 0.995,
        "n_steps": 5,
        "learning_rate": 0.00083,
        "ent_coef": 1e-5,
        "anneal": True,
    },
    ("ppo", "Acrobot-v1"): {
        "n_envs": 16,
        "total": 1_000_000,
        "normalize": True,
        "n_steps": 256,
        "gae_lambda": 0.94,
        "gamma": 0.99,
        "n_epochs": 4,
        "ent_coef": 0.0,
    },
    ("a2c", "Acrobot-v1"): {"n_envs": 16, "total": 500_000, "normalize": True, "ent_coef": 0.0},
    ("ppo", "HalfCheetah-v5"): {
        "n_envs": 1,
        "total": 1_000_000,
        "normalize": True,
        "batch_size": 64,
        "n_steps": 512,
        "gamma": 0.98,
        "learning_rate": 2.0633e-05,
        "ent_coef": 0.000401762,
        "clip_range": 0.1,
        "n_epochs": 20,
        "gae_lambda": 0.92,
        "max_grad_norm": 0.8,
        "vf_coef": 0.58096,
        "policy_kwargs": {
            "log_std_init": -2,
            "ortho_init": False,
            "activation_fn": torch.nn.ReLU,
            "net_arch": {"pi": [256, 256], "vf": [256, 256]},
        },
    },
    ("a2c", "HalfCheetah-v5"): {
        "n_envs": 4,
        "total": 1_000_000,
        "normalize": True,
        "ent_coef": 0.0,
        "max_grad_norm": 0.5,
        "n_steps": 8,
        "gae_lambda": 0.9,
        "vf_coef": 0.4,
        "gamma": 0.99,
        "use_rms_prop": True,
        "normalize_advantage": False,
        "learning_rate": 0.00096,
        "anneal": True,
        "use_sde": True,
        "policy_kwargs": {"log_std_init": -2, "ortho_init": False},
    },
}


class Curve(BaseCallback):
    """Time, steps and the mean return of the last 100 episodes, every second."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path
        self._write("w", "time", "steps", "mean_return")
        self._next = 0.0

    def _write(self, mode: str, *row: Any) -> None:
        with open(self._path, mode, newline="") as file:
            csv.writer(file).writerow(row)

    def _on_step(self) -> bool:
        now = time.time()
        episodes = self.model.ep_info_buffer
        if now >= self._next and episodes:
            mean = sum(episode["r"] for episode in episodes) / len(episodes)
            self._write("a", now, self.num_timesteps, mean)
            self._next = now + 1.0
        return True


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("env", "algo", "out"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--seed", type=int, required=True)
    args = parser.parse_args()
    is_atari = "NoFrameskip" in args.env
    settings = dict(SETTINGS[args.algo, "atari" if is_atari else args.env])
    n_envs, total = settings.pop("n_envs"), settings.pop("total")
    normalize = settings.pop("normalize", False)
    if settings.pop("anneal", False):
        for name in ("learning_rate", "clip_range"):
            if name in settings:
                settings[name] = lambda left, first=settings[name]: left * first
    if is_atari:
        envs = make_atari_env(args.env, n_envs, args.seed, vec_env_cls=SubprocVecEnv)
        envs = VecFrameStack(envs, 4)
    else:
        envs = make_vec_env(args.env, n_envs, args.seed)
    if normalize:
        envs = VecNormalize(envs, gamma=settings.get("gamma", 0.99))
    policy = "CnnPolicy" if is_atari else "MlpPolicy"
    kind = {"ppo": PPO, "a2c": A2C}[args.algo]
    model = kind(policy, envs, seed=args.seed, device="cpu", **settings)
    model.learn(total, callback=Curve(args.out))


if __name__ == "__main__":
    main()
