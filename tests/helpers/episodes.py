"""Catch as a simulator that calls the agent.

    python -m tests.helpers.episodes ADDRESS NUM {stay,leave}

Those that stay play all their episodes in one connection. Those that leave tear themselves down
after each episode and dial in anew.
"""

import sys
import threading

import torchbeast
from torchbeast.envs.toys import Catch

NUM_ACTIONS = 3


def play_and_stay(address: str, seed: int) -> None:
    env = Catch()
    frame, _ = env.reset(seed=seed)
    with torchbeast.connect(address, num_actions=NUM_ACTIONS) as actor:
        action = actor.step(frame)
        while True:
            frame, reward, done, _, _ = env.step(action)
            if done:
                frame, _ = env.reset()
            action = actor.step(frame, reward, done)


def play_and_leave(address: str, seed: int) -> None:
    while True:
        env, done = Catch(), False
        frame, _ = env.reset(seed=seed)
        seed += 1
        with torchbeast.connect(address, num_actions=NUM_ACTIONS) as actor:
            action = actor.step(frame)
            while not done:
                frame, reward, done, _, _ = env.step(action)
                # There is no next episode here whose first frame could be shown at the end.
                action = actor.step(frame, reward, done)


def main(address: str, num_simulators: int, how: str) -> None:
    """Until killed."""
    play = {"stay": play_and_stay, "leave": play_and_leave}[how]
    threads = [
        threading.Thread(target=play, args=(address, 1_000_000 * i)) for i in range(num_simulators)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
