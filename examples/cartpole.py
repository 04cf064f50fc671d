"""CartPole from Python: train, then play one episode with the agent. About a minute.

python examples/cartpole.py
"""

import gymnasium
import tyro

import torchbeast


def main(total_steps: int = 200_000, savedir: str = "~/logs/torchbeast") -> None:
    run = torchbeast.train("CartPole-v1", total_steps=total_steps, savedir=savedir)
    print(f"Mean return {run.figures['mean_episode_return']:.0f}, kept in {run.rundir}")

    agent = torchbeast.Agent.load(run.rundir)
    env = gymnasium.make("CartPole-v1")
    observation, _ = env.reset(seed=1)
    total, over = 0.0, False
    while not over:
        observation, reward, terminated, truncated, _ = env.step(agent.act(observation))
        total, over = total + float(reward), terminated or truncated
    print(f"An episode with its most likely actions: {total:.0f}")


if __name__ == "__main__":
    tyro.cli(main)
