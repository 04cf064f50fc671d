"""A trained agent outside of its run acts as it did inside."""

from typing import ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

import torchbeast
from examples.tic_tac_toe import TicTacToe
from libtorchbeast.tree import map_tree
from tests.helpers import masked, tasks
from tests.helpers.saved_run import save_run
from torchbeast import user_code
from torchbeast.envs import make_envs
from torchbeast.errors import UsageError
from torchbeast.models import as_output

OBSERVATION = spaces.Dict(
    {
        "numbers": spaces.Box(-1.0, 1.0, (3,), np.float64),
        "place": spaces.Discrete(4),
        "action_mask": spaces.MultiBinary(3),
    }
)


class Masked(tasks.Task):
    """Actions are 7, 8 and 9, of which one is possible."""

    length = 4

    def __init__(self):
        super().__init__(OBSERVATION)
        self.action_space = spaces.Discrete(3, start=7)

    def observe(self):
        mask = np.zeros(3, np.int8)
        mask[self._time % 3] = 1
        return {**self.observation_space.sample(), "action_mask": mask}


class Floats(tasks.Task):
    """Actions in narrow bounds, as float64."""

    length = 4

    def __init__(self):
        super().__init__(spaces.Box(-1, 1, (2,), np.float32))
        self.action_space = spaces.Box(-1e-3, 1e-3, (2,), np.float64)

    def observe(self):
        return self.observation_space.sample()

    def pay(self, action):
        return float(action[0])


class Recording(gymnasium.Wrapper):
    """Keeps all that passes between the environment and the agent."""

    seen: ClassVar[list] = []

    def reset(self, **options):
        observation, info = self.env.reset(**options)
        self.seen.append(["reset", observation, 0.0])
        return observation, info

    def step(self, action):
        self.seen.append(["action", action])
        observation, reward, *rest = self.env.step(action)
        self.seen.append(["step", observation, reward])
        return (observation, reward, *rest)


def load(savedir, run="run", **options):
    return torchbeast.Agent.load(run, savedir=savedir, **options)


@torch.inference_mode()
def record(flags, model, num_steps):
    """What passed between an environment and an agent as a run has them."""
    Recording.seen.clear()
    model.eval()
    envs = make_envs(flags.env_options, 1, seed=1)
    row, state = envs.reset(), model.initial_state(batch_size=1)
    for _ in range(num_steps):
        inputs = map_tree(lambda array: torch.from_numpy(array).unsqueeze(0), row)
        output, state = model(inputs, state)
        row = envs.step(map_tree(lambda x: x[0].numpy(), as_output(output)["action"]))
    return list(Recording.seen)


@pytest.mark.parametrize("env", ["Memory", "tests.test_saved_agent:Masked", "Pendulum-v1"])
def test_it_acts_as_in_its_run(env, tmp_path):
    """With a memory, over ends of episodes, and in the environment's own form."""
    wrappers = "tests.test_saved_agent:Recording"
    flags, model = save_run(tmp_path, env=env, use_lstm=True, wrappers=wrappers)
    agent = load(tmp_path)
    num_actions = 0
    for kind, *content in record(flags, model, 14):
        if kind == "action":
            np.testing.assert_allclose(action, content[0], rtol=1e-5)  # noqa: F821
            assert type(action) is type(content[0])  # noqa: F821
            num_actions += 1
            continue
        if kind == "reset":
            agent.reset()
        action = agent.act(*content)  # noqa: F841
    assert num_actions >= 12


def test_it_needs_no_environment(tmp_path):
    """What the environment's spaces are stands in the checkpoint."""
    save_run(tmp_path, env="tests.test_saved_agent:Masked")
    agent = load(tmp_path, tmp_path / "run" / "model.tar")
    mask = np.array([0, 1, 0], np.int8)
    action = agent.act({"numbers": [0.1, 0.2, 0.3], "place": 2, "action_mask": mask})
    assert action == 8
    assert isinstance(action, int)


def play_games(agent, env, seed, act):
    """Games against the example's other player, which raises at fields that are taken."""
    for game in range(5):
        observation, info = env.reset(seed=seed + game)
        agent.reset()
        is_over = False
        while not is_over:
            observation, _, is_over, _, info = env.step(act(observation, info))


@pytest.mark.parametrize("place", ["info", "method", "nothing"])
def test_a_mask_beside_the_observation_is_an_argument(place, tmp_path):
    save_run(tmp_path, env="examples.tic_tac_toe:TicTacToe")
    agent = load(tmp_path, sample_actions=True)
    mask_of = {
        "info": lambda observation, info: info["action_mask"],
        "method": lambda observation, info: [int(field == 0) for field in observation],
        "nothing": lambda observation, info: None,
    }[place]

    def act(observation, info):
        return agent.act(observation, action_mask=mask_of(observation, info))

    if place != "nothing":
        play_games(agent, TicTacToe(), 1, act)
        return
    with pytest.raises(UsageError, match=r"got no action_mask; give action_mask=info\['action_mas"):
        play_games(agent, TicTacToe(), 1, act)


def test_its_environment_shows_the_mask_in_the_observation(tmp_path):
    save_run(tmp_path, env="examples.tic_tac_toe:TicTacToe")
    agent = load(tmp_path, env=TicTacToe, sample_actions=True)
    env = agent.make_env()
    assert env.observation_space.contains(env.reset(seed=1)[0])
    play_games(agent, env, 1, lambda observation, info: agent.act(observation))


@pytest.mark.parametrize("place", masked.PLACES)
def test_its_environment_fits_wherever_masks_come_from(place, tmp_path):
    kwargs = f'{{"place": "{place}"}}'
    save_run(tmp_path, env="tests.helpers.masked:Masked", env_kwargs=kwargs)
    agent = load(tmp_path, env="tests.helpers.masked:Masked")
    env = agent.make_env()
    for seed in range(5):
        observation, _ = env.reset(seed=seed)
        agent.reset()
        is_over = False
        while not is_over:
            observation, _, is_over, _, _ = env.step(agent.act(observation))


def test_a_mask_that_cannot_be_used_is_one_sentence(tmp_path):
    save_run(tmp_path, env="examples.tic_tac_toe:TicTacToe")
    agent = load(tmp_path)
    with pytest.raises(UsageError, match=r"action_mask from act\(...\) must have 9 numbers.*got 2"):
        agent.act(np.zeros(9), action_mask=[1, 1])
    with pytest.raises(UsageError, match="must allow an action at each choice"):
        agent.act(np.zeros(9), action_mask=np.zeros(9))
    save_run(tmp_path, env="CartPole-v1")
    with pytest.raises(UsageError, match=r"trained without masks .* leave it out"):
        load(tmp_path).act(np.zeros(4), action_mask=[1, 1])


def test_floats_keep_the_bounds_and_the_width_of_the_environment(tmp_path):
    save_run(tmp_path, env="tests.test_saved_agent:Floats")
    agent = load(tmp_path, sample_actions=True)
    actions = [agent.act(np.zeros(2)) for _ in range(20)]
    assert all(Floats().action_space.contains(action) for action in actions)
    assert len({tuple(action) for action in actions}) > 1
    greedy = load(tmp_path)
    assert greedy.act(np.zeros(2)).tolist() == greedy.act(np.zeros(2)).tolist()


@pytest.mark.parametrize(
    ("observation", "got"),
    [
        (np.zeros(3), r"float64\[3\] for float32\[4\]"),
        (np.zeros(4, complex), "complex128"),
        ({"a": 1}, r"object\[\]"),
    ],
)
def test_another_observation_is_one_sentence(observation, got, tmp_path):
    save_run(tmp_path, env="CartPole-v1")
    with pytest.raises(UsageError, match=rf"The observation must be float32\[4\], got {got}"):
        load(tmp_path).act(observation)


def test_a_missing_part_is_one_sentence(tmp_path):
    save_run(tmp_path, env="tests.test_saved_agent:Masked")
    with pytest.raises(UsageError, match=r"must be {'action_mask.*KeyError: 'place'"):
        load(tmp_path).act({"numbers": np.zeros(3), "action_mask": np.ones(3, np.int8)})


def test_the_callers_observation_stays_as_it_is(tmp_path):
    class Writes(nn.Module):
        def __init__(self, frame_shape, num_actions, use_lstm):
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def initial_state(self, batch_size):
            return ()

        def forward(self, inputs, state):
            logits = self.linear(inputs["frame"].mul_(0))
            output = {"policy_logits": logits, "baseline": logits[..., 0]}
            return {**output, "action": logits.argmax(-1)}, state

    with user_code.offer({"own:Writes": Writes}):
        save_run(tmp_path, env="CartPole-v1", model="own:Writes")
    observation = np.ones(4, np.float32)
    load(tmp_path, model=Writes).act(observation)
    assert (observation == 1).all()
    with pytest.raises(UsageError, match=r"a checkpoint cannot run code; pass it, too: model=..."):
        load(tmp_path)


def test_an_older_checkpoint_needs_its_environment(tmp_path):
    save_run(tmp_path, with_spec=False, env="CartPole-v1")
    assert load(tmp_path).act(np.zeros(4)) in (0, 1)
    save_run(tmp_path, with_spec=False, env="tests.helpers.tasks:Corridor")
    with pytest.raises(UsageError, match=r"pass it, too: env=... \(it was tests.helpers.tasks"):
        load(tmp_path)
    assert load(tmp_path, env=tasks.Corridor).act(np.zeros(4)) in (0, 1)


def test_its_environment_is_made_as_it_was(tmp_path):
    save_run(tmp_path, env="CartPole-v1", frame_stack=2)
    agent = load(tmp_path)
    env = agent.make_env(render=True)
    observation, _ = env.reset(seed=1)
    assert observation.shape == (2, 4)
    assert agent.act(observation) in (0, 1)
    assert env.render().ndim == 3
    env.close()


def test_an_atari_agent_gets_a_game_that_is_preprocessed(tmp_path):
    save_run(tmp_path, env="PongNoFrameskip-v4")
    agent = load(tmp_path)
    env = agent.make_env()
    observation, _ = env.reset(seed=1)
    assert observation.shape == (4, 84, 84)
    env.step(agent.act(observation))
    env.close()


def test_a_run_that_is_missing_is_one_sentence(tmp_path):
    with pytest.raises(UsageError, match=r"There is no agent in run; name a run in .*its folder"):
        load(tmp_path)
