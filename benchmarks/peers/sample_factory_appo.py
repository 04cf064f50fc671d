"""Sample Factory's APPO with the settings of its examples; writes a curve until it is stopped.

Run by `benchmarks/scoreboard.py`, in a virtual environment of its own. Sample Factory's examples
are tuned for more cores; here, the same number of environments is spread over two workers.
"""

import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import numpy as np
from curves import Curve
from environments import is_atari, is_minatar, make_env, parse_arguments
from gymnasium.wrappers import RecordEpisodeStatistics
from nets import SmallConv
from sample_factory.algo.runners.runner import AlgoObserver, Runner
from sample_factory.algo.utils.context import global_model_factory
from sample_factory.algo.utils.misc import EPISODIC, ExperimentStatus
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.model.encoder import Encoder
from sample_factory.train import make_runner
from sf_examples.atari.atari_params import atari_override_defaults
from sf_examples.atari.atari_utils import ATARI_ENVS, make_atari_env
from sf_examples.mujoco.mujoco_params import mujoco_override_defaults

WORKERS = 2
# The key of a whole game's return: recorded beneath the wrappers for rewards and lives.
WHOLE_GAME = "RecordEpisodeStatistics_reward"


def set_gym_defaults(parser: ArgumentParser) -> None:
    """The settings of the command that its example for Gymnasium recommends."""
    parser.set_defaults(
        use_rnn=False,
        num_envs_per_worker=20,
        policy_workers_per_policy=2,
        recurrence=1,
        with_vtrace=False,
        batch_size=512,
        reward_scale=0.1,
    )


def set_defaults(name: str, parser: ArgumentParser) -> None:
    if is_atari(name) or is_minatar(name):
        atari_override_defaults(name, parser)
        parser.set_defaults(num_envs_per_worker=8 // WORKERS)
        if is_minatar(name):  # Sample Factory has no settings for it
            parser.set_defaults(env_frameskip=1, env_framestack=1, obs_scale=1.0)
    elif name.startswith("HalfCheetah"):
        mujoco_override_defaults(name, parser)
        parser.set_defaults(num_envs_per_worker=64 // WORKERS)
    else:
        set_gym_defaults(parser)
    parser.set_defaults(num_workers=WORKERS)


def make_game(name: str, cfg: Any, env_config: Any, render_mode: str | None = None) -> Any:
    if not is_atari(name):
        return RecordEpisodeStatistics(make_env(name, render_mode=render_mode))
    [its_name] = [spec.name for spec in ATARI_ENVS if spec.env_id == name]
    return make_atari_env(its_name, cfg, env_config, render_mode)


class MinAtarEncoder(Encoder):
    """`SmallConv` with Sample Factory's interface."""

    def __init__(self, cfg: Any, obs_space: Any) -> None:
        super().__init__(cfg)
        self.net = SmallConv(obs_space["obs"].shape)

    def forward(self, obs_dict: Any) -> Any:
        return self.net(obs_dict["obs"])

    def get_out_size(self) -> int:
        return self.net.num_features


class Observer(AlgoObserver):
    """Writes the curve. Sample Factory counts frames, where frames are skipped."""

    def __init__(self, curve: Curve, frames_per_step: int) -> None:
        self._curve, self._frames_per_step = curve, frames_per_step

    def add_episode(self, _runner: Runner, message: dict[str, Any], _policy: int) -> None:
        # The end of a life has no return of a whole game.
        for value in np.atleast_1d(message[EPISODIC].get(WHOLE_GAME, [])):
            self._curve.add_return(value)

    def on_training_step(self, runner: Runner, _iteration: int) -> None:
        self._curve.add_row(runner.env_steps.get(0, 0) / self._frames_per_step)


def main() -> None:
    args = parse_arguments()
    register_env(args.env, make_game)
    if is_minatar(args.env):
        global_model_factory().register_encoder_factory(MinAtarEncoder)
    argv = [
        *("--algo=APPO", f"--env={args.env}", f"--seed={args.seed}", "--device=cpu"),
        *(f"--train_dir={Path(args.out).parent}", "--experiment=run"),
    ]
    parser, _ = parse_sf_args(argv)
    set_defaults(args.env, parser)
    cfg, runner = make_runner(parse_full_cfg(parser, argv))
    frames_per_step = cfg.env_frameskip if cfg.summaries_use_frameskip else 1
    observer = Observer(Curve(args.out), frames_per_step)
    runner.register_observer(observer)
    runner.register_episodic_stats_handler(observer.add_episode)
    status = runner.init()
    if status == ExperimentStatus.SUCCESS:
        status = runner.run()
    sys.exit(status)


if __name__ == "__main__":
    main()
