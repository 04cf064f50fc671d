"""A simulator with a main loop of its own, which dials in: its actions are floats, a Box.

python -m torchbeast.polybeast_learner --env remote --listen 127.0.0.1:4242
python examples/aim_simulator.py --connect 127.0.0.1:4242

A target appears in a square, and the agent says where to shoot. The nearer, the better: 1 at most.
`docs/remote.md` says how to connect to another machine.
"""

import argparse
import random

from gymnasium import spaces

import torchbeast
from libtorchbeast.rpc.simulator import LearnerFinished

SHOTS = 10  # in each episode

OBSERVATION = spaces.Box(-1.0, 1.0, (2,))  # where the target is
ACTION = spaces.Box(-2.0, 2.0, (2,))  # where to shoot


class Range:
    """The simulator, which does not know about agents."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.place_target()

    def place_target(self) -> None:
        self.target = [self._random.uniform(-1, 1) for _ in range(2)]

    def shoot(self, x: float, y: float) -> float:
        """How good the shot was; places the next target."""
        distance = abs(x - self.target[0]) + abs(y - self.target[1])
        self.place_target()
        return max(0.0, 1.0 - distance / 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--connect", default="127.0.0.1:4242", help="the learner's host:port")
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    simulator = Range(flags.seed)
    spaces = {"observation_space": OBSERVATION, "action_space": ACTION}
    with torchbeast.connect(flags.connect, name="range", **spaces) as actor:
        num_shots = 0
        action = actor.step(simulator.target)
        while True:
            reward = simulator.shoot(*action)
            num_shots += 1
            try:
                action = actor.step(simulator.target, reward, done=num_shots % SHOTS == 0)
            except LearnerFinished:
                print(f"Training is finished after {num_shots} shots.")
                return


if __name__ == "__main__":
    main()
