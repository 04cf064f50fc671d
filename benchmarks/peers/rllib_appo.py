"""RLlib's APPO with the settings of its examples; writes a curve until it is stopped.

Run by `benchmarks/scoreboard.py`, in a virtual environment of its own. RLlib's examples are tuned
for more cores; here, environments are spread over two processes.
"""

from pathlib import Path
from typing import Any

import gymnasium
import ray
from curves import Curve
from environments import is_atari, is_minatar, make_env, parse_arguments
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.connectors.env_to_module.frame_stacking import FrameStackingEnvToModule
from ray.rllib.connectors.learner.frame_stacking import FrameStackingLearner
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.env.wrappers.atari_wrappers import wrap_atari_for_new_api_stack
from ray.tune.registry import register_env
from ray.tune.trainable import trainable

WORKERS = 2
STEPS = "num_env_steps_sampled_lifetime"
PICTURES: dict[str, Any] = {
    "train_batch_size_per_learner": 500,
    "target_network_update_freq": 2,
    "lr": 0.0005,
    "vf_loss_coeff": 1.0,
    "entropy_coeff": [[0, 0.01], [3_000_000, 0.0]],
    "broadcast_interval": 5,
    "circular_buffer_num_batches": 4,
    "circular_buffer_iterations_per_batch": 2,
}
CARTPOLE: dict[str, Any] = {
    "circular_buffer_iterations_per_batch": 2,
    "vf_loss_coeff": 0.05,
    "entropy_coeff": 0.0,
}
MUJOCO: dict[str, Any] = {
    "train_batch_size_per_learner": 4096,
    "circular_buffer_num_batches": 16,
    "circular_buffer_iterations_per_batch": 20,
    "target_network_update_freq": 2,
    "target_worker_clipping": 2.0,
    "clip_param": 0.4,
    "grad_clip": 0.5,
    "grad_clip_by": "value",
    "lr": 0.0005,
    "vf_loss_coeff": 0.5,
    "gamma": 0.995,
    "lambda_": 0.995,
    "entropy_coeff": 0.0,
    "use_kl_loss": True,
    "kl_coeff": 1.0,
    "kl_target": 0.04,
}


class Recorder(gymnasium.Wrapper):
    """Appends the return of every whole game to a file; RLlib's are of lives, and clipped.

    A line is written in one go, so that processes may share the file.
    """

    def __init__(self, env: gymnasium.Env, path: str) -> None:
        super().__init__(env)
        self._path = path
        self._return = 0.0

    def reset(self, **kwargs: Any) -> Any:
        self._return = 0.0
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        self._return += float(reward)
        if terminated or truncated:
            with open(self._path, "a") as file:
                file.write(f"{self._return}\n")
            self._return = 0.0
        return observation, reward, terminated, truncated, info


def make_recorded(config: dict[str, Any]) -> gymnasium.Env:
    env: gymnasium.Env = Recorder(make_env(config["name"]), config["games"])
    return wrap_atari_for_new_api_stack(env, dim=64) if is_atari(config["name"]) else env


def find_config(name: str, env_config: dict[str, Any], seed: int) -> APPOConfig:
    config = (
        APPOConfig()
        .environment("recorded", env_config=env_config, clip_rewards=is_atari(name))
        .debugging(seed=seed, log_level="ERROR")
        .env_runners(num_env_runners=WORKERS, num_envs_per_env_runner=16)
        .reporting(min_time_s_per_iteration=1)
    )
    if is_atari(name):
        net = {
            "conv_filters": [(16, 4, 2), (32, 4, 2), (64, 4, 2), (128, 4, 2)],
            "conv_activation": "relu",
            "head_fcnet_hiddens": [256],
        }
        config.env_runners(
            num_envs_per_env_runner=10,
            env_to_module_connector=lambda *_, **__: FrameStackingEnvToModule(num_frames=4),
        )
        config.training(
            learner_connector=lambda *_, **__: FrameStackingLearner(num_frames=4), **PICTURES
        )
    elif is_minatar(name):  # RLlib has no settings for it: those of Atari with a smaller net
        net = {
            "conv_filters": [(16, 3, 1)],
            "conv_activation": "relu",
            "head_fcnet_hiddens": [128],
        }
        config.env_runners(num_envs_per_env_runner=10).training(**PICTURES)
    elif name.startswith("HalfCheetah"):
        config.env_runners(num_envs_per_env_runner=32, rollout_fragment_length=512)
        return config.training(**MUJOCO)
    else:
        # RLlib has settings for CartPole alone; others get its defaults.
        net = {}
        config.training(**(CARTPOLE if name.startswith("CartPole") else {}))
    return config.rl_module(model_config=DefaultModelConfig(vf_share_layers=True, **net))


def main() -> None:
    args = parse_arguments()
    folder = Path(args.out).parent
    games = folder / "games.txt"
    games.touch()
    register_env("recorded", make_recorded)
    trainable.DEFAULT_STORAGE_PATH = str(folder)  # else it leaves a folder in the home directory
    # More CPUs than there are: the number only limits how many processes may be started.
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, _temp_dir=str(folder))
    config = find_config(args.env, {"name": args.env, "games": str(games)}, args.seed)
    curve, algorithm = Curve(args.out), config.build_algo()
    with games.open() as file:
        while True:
            steps = algorithm.train()["env_runners"].get(STEPS, 0)
            for line in file:
                curve.add_return(float(line))
            curve.add_row(steps)


if __name__ == "__main__":
    main()
