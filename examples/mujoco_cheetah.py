"""MuJoCo: float actions, for which observations and rewards are normalised by default.

pip install mujoco imageio
python examples/mujoco_cheetah.py
"""

import numpy as np
import tyro

import torchbeast


def main(
    env: str = "HalfCheetah-v5", total_steps: int = 1_000_000, savedir: str = "~/logs/torchbeast"
) -> None:
    run = torchbeast.train(env, total_steps=total_steps, savedir=savedir, squash_actions=True)

    agent = torchbeast.Agent.load(run.rundir)  # with its running statistics
    game = agent.make_env()
    observation, _ = game.reset(seed=1)
    forces = []
    for _ in range(100):
        forces.append(agent.act(observation))  # within the bounds of the action space
        observation, _, terminated, truncated, _ = game.step(forces[-1])
        if terminated or truncated:
            observation, _ = game.reset()
            agent.reset()
    print(f"{run.rundir}: mean force {np.abs(forces).mean():.2f}")


if __name__ == "__main__":
    tyro.cli(main)
