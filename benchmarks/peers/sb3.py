"""Stable-Baselines3 with the settings of its zoo; writes a curve until it is stopped.

Run by `benchmarks/scoreboard.py`, in a virtual environment of its own.
"""

from typing import Any

import torch
from curves import Curve
from environments import is_atari, is_minatar, make_env, parse_arguments
from nets import SmallConv
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.sb2_compat.rmsprop_tf_like import RMSpropTFLike
from stable_baselines3.common.vec_env import SubprocVecEnv, VecEnv, VecFrameStack, VecNormalize

RMSPROP = {"optimizer_class": RMSpropTFLike, "optimizer_kwargs": {"eps": 1e-5}}
# From rl-baselines3-zoo: environments, steps in total (to which rates are annealed), the rest.
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


class Observer(BaseCallback):
    """Writes the curve. Returns are those of `Monitor`, which is beneath the wrappers that clip
    rewards and end games with a life."""

    def __init__(self, curve: Curve) -> None:
        super().__init__()
        self._curve = curve

    def _on_step(self) -> bool:
        for info in self.locals["infos"]:
            if "episode" in info:
                self._curve.add_return(info["episode"]["r"])
        self._curve.add_row(self.num_timesteps)
        return True


class MinAtarFeatures(SmallConv):
    """`SmallConv` with Stable-Baselines3's interface."""

    features_dim = SmallConv.num_features

    def __init__(self, observation_space: Any) -> None:
        super().__init__(observation_space.shape)


def make_vector(name: str, num_envs: int, seed: int) -> VecEnv:
    if is_atari(name):
        envs = make_atari_env(
            lambda **kwargs: make_env(name, **kwargs), num_envs, seed, vec_env_cls=SubprocVecEnv
        )
        return VecFrameStack(envs, 4)
    return make_vec_env(lambda **kwargs: make_env(name, **kwargs), num_envs, seed)


def find_settings(algo: str, name: str) -> dict[str, Any]:
    """The zoo's settings; it has none for MinAtar, which gets those of Atari with a smaller net."""
    kind = "atari" if is_atari(name) or is_minatar(name) else name
    settings = dict(SETTINGS[algo, kind])
    if is_minatar(name):
        net = {"features_extractor_class": MinAtarFeatures, "net_arch": []}
        settings["policy_kwargs"] = {**settings.get("policy_kwargs", {}), **net}
    return settings


def main() -> None:
    args = parse_arguments("algo")
    settings = find_settings(args.algo, args.env)
    n_envs, total = settings.pop("n_envs"), settings.pop("total")
    normalize = settings.pop("normalize", False)
    if settings.pop("anneal", False):
        for name in ("learning_rate", "clip_range"):
            if name in settings:
                settings[name] = lambda left, first=settings[name]: left * first
    envs = make_vector(args.env, n_envs, args.seed)
    if normalize:
        envs = VecNormalize(envs, gamma=settings.get("gamma", 0.99))
    policy = "CnnPolicy" if is_atari(args.env) else "MlpPolicy"
    kind = {"ppo": PPO, "a2c": A2C}[args.algo]
    model = kind(policy, envs, seed=args.seed, device="cpu", **settings)
    model.learn(total, callback=Observer(Curve(args.out)))


if __name__ == "__main__":
    main()
