"""A program of a user's own: it trains from Python, has no `if __name__ == "__main__"`, and all of
its classes are its main module's. Arguments: the beast, the savedir, how it is called."""

import asyncio
import random
import sys
import threading

import gymnasium
import numpy as np
import torch
from torch import nn

import torchbeast

train_agent = torchbeast.train  # its imports draw random numbers
BEAST, SAVEDIR, HOW = sys.argv[1:]


class Guess(gymnasium.Env):
    """The observation says which of the actions 5 and 6 pays."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float64)
    action_space = gymnasium.spaces.Discrete(2, start=5)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.look(), {}

    def step(self, action):
        paid = float(action - 5 == self.answer)
        self.time += 1
        return self.look(), paid, self.time == 5, False, {"is_success": paid}

    def look(self):
        self.answer = int(self.np_random.integers(2))
        return np.array([self.answer, 1.0])


class Net(nn.Module):
    """Asks for spaces."""

    def __init__(self, observation_space, action_space):
        super().__init__()
        self.hidden = nn.Linear(observation_space.shape[0], 32)
        self.policy = nn.Linear(32, int(action_space.n))
        self.baseline = nn.Linear(32, 1)

    def initial_state(self, batch_size):
        return ()

    def forward(self, inputs, state):
        x = torch.tanh(self.hidden(inputs["frame"]))
        logits = self.policy(x)
        drawn = torch.distributions.Categorical(logits=logits).sample()
        action = drawn if self.training else logits.argmax(-1)
        return {
            "policy_logits": logits,
            "baseline": self.baseline(x)[..., 0],
            "action": action,
        }, state


class Twice(gymnasium.RewardWrapper):
    def reward(self, reward):
        return 2 * float(reward)


gymnasium.register("Guess-v0", entry_point="__main__:Guess")
ENV = "Guess-v0" if HOW == "loop" else lambda: Guess()


def train(total_steps):
    return train_agent(
        ENV,
        Net,
        wrappers=[Twice],
        beast=BEAST,
        savedir=SAVEDIR,
        xpid="run",
        total_steps=total_steps,
        log_interval_s=0.2,
        entropy_cost=0.001,
    )


async def train_in_a_loop(total_steps):
    return train(total_steps)


def train_in_a_thread(total_steps):
    runs = []
    thread = threading.Thread(target=lambda: runs.append(train(total_steps)))
    thread.start()
    thread.join(200)
    return runs[0]


random.seed(3)
if HOW == "for ever":
    train(10**9)
run = asyncio.run(train_in_a_loop(30_000)) if HOW == "loop" else train_in_a_thread(30_000)
generator = random.Random()
generator.seed(3)
assert random.random() == generator.random(), "the program's random numbers are its own"
agent = torchbeast.Agent.load(run.rundir, model=Net)
actions = [agent.act(np.array([answer, 1.0])) for answer in (0, 1, 0)]
returns = torchbeast.evaluate("run", ENV, Net, wrappers=[Twice], savedir=SAVEDIR, num_episodes=2)
run = train(32_000)  # a resume
print("RESULT", run.rundir.name, run.figures["step"], run.figures["info/is_success"])
print("ACTIONS", actions, "RETURNS", returns)
