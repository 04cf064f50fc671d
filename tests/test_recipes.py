"""Which settings a run gets, by what its environment is like; what the command line says stays."""

import dataclasses

import numpy as np
import pytest
from gymnasium import spaces

from libtorchbeast.rows import Spec
from libtorchbeast.specs import ArraySpec, discrete, spec_of_space
from tests.helpers.specs import spec_for
from torchbeast import monobeast, polybeast, polybeast_learner
from torchbeast.core.settings import Settings
from torchbeast.envs import EnvOptions
from torchbeast.run import recipes
from torchbeast.run.command_line import parse
from torchbeast.run.flags import num_cores, with_recipe

VECTOR, IMAGE = spec_for((4,), 2), spec_for((84, 84), 2)


@pytest.mark.parametrize(
    ("env", "clipping"),
    [
        ("PongNoFrameskip-v4", "abs_one"),
        ("ALE/Breakout-v5", "abs_one"),
        ("Catch", "none"),
        ("Mock", "none"),  # an image, but no game with a score
        ("CartPole-v1", "none"),
        ("tests.helpers.tasks:Bandit", "none"),
    ],
)
def test_rewards_are_clipped_in_atari_alone(env, clipping):
    assert parse(monobeast.Flags, ["--env", env]).reward_clipping == clipping


@pytest.mark.parametrize(
    ("env", "scaled"), [("PongNoFrameskip-v4", False), ("Mock", True), ("CartPole-v1", True)]
)
def test_rewards_are_scaled_where_they_are_not_clipped(env, scaled):
    assert parse(monobeast.Flags, ["--env", env]).normalize_rewards == scaled


def test_the_paper_clips_rewards_and_what_is_given_stays():
    assert recipes.PAPER["reward_clipping"] == "abs_one"
    args = ["--env", "PongNoFrameskip-v4", "--reward_clipping", "none"]
    assert parse(monobeast.Flags, args).reward_clipping == "none"
    assert Settings().reward_clipping == "none"


def test_code_for_torchbeast_has_its_rewards_clipped_as_they_were():
    class Theirs:
        learning_rate = 0.1

    assert polybeast_learner._settings_of(Theirs()).reward_clipping == "abs_one"


def test_remote_environments_get_their_recipe_when_it_is_known_what_they_are_like():
    args = ["--env", "remote", "--listen", "127.0.0.1:0", "--learning_rate", "0.5"]
    flags = parse(polybeast_learner.Flags, args)
    assert flags.total_steps == Settings().total_steps
    of_vectors = with_recipe(flags, VECTOR)
    assert of_vectors.total_steps == recipes.VECTOR["total_steps"]
    assert of_vectors.clip_ratio == recipes.VECTOR["clip_ratio"]
    assert of_vectors.num_actors is None  # whoever dials in
    assert of_vectors.learning_rate == 0.5  # given
    assert of_vectors.sources["total_steps"] == "recipe"
    of_images = with_recipe(flags, IMAGE)
    assert of_images.total_steps == Settings().total_steps
    assert of_images.num_passes == recipes.IMAGE["num_passes"]


def test_remote_environments_with_the_papers_recipe_have_it_at_once():
    flags = parse(polybeast_learner.Flags, ["--env", "remote", "--recipe", "paper"])
    assert flags.batch_size == 32
    assert with_recipe(flags, VECTOR) == flags


@pytest.mark.parametrize(
    "space", [spaces.Discrete(5), spaces.MultiBinary(3), spaces.Box(0, 1, (), np.float32)], ids=str
)
def test_numbers_get_the_settings_of_vectors(space):
    assert recipes._for_frames(Spec(spec_of_space(space), discrete(2)), "auto") == recipes.VECTOR


@pytest.mark.parametrize("model", ["auto", "deep", "package.module:Class"])
def test_images_in_a_tree_get_the_settings_of_images(model):
    image = ArraySpec("uint8", (84, 84))
    for observation in (
        {"camera": image, "speed": ArraySpec("float32", (2,))},
        {"camera": image, "action_mask": ArraySpec("int8", (2,))},
    ):
        found = recipes._for_frames(Spec(observation, discrete(2)), model)
        different = recipes.OTHERS_NETS if ":" in model else recipes.FAST_CONVOLUTIONS
        assert found == recipes.IMAGE | different


def test_vectors_in_a_tree_get_the_settings_of_vectors():
    observation = (ArraySpec("float32", (2,)), ArraySpec("float32", (3,)))
    assert recipes._for_frames(Spec(observation, discrete(2)), "auto") == recipes.VECTOR


def test_there_is_an_environment_for_each_place_in_a_batch_of_vectors():
    mono = parse(monobeast.Flags, ["--env", "Catch"])
    poly = parse(polybeast.Flags, ["--env", "Catch", "--num_servers", "3"])
    assert mono.num_actors * mono.envs_per_actor == mono.batch_size == 32
    assert (poly.num_servers, poly.num_groups, poly.envs_per_actor) == (3, 6, 5)  # 3 are given
    assert poly.queue_size == 0
    few = parse(polybeast.Flags, ["--env", "Catch", "--batch_size", "8"])
    assert few.num_groups * few.envs_per_actor == 8
    off = parse(polybeast.Flags, ["--env", "Catch", "--no-hold_actors"])
    assert off.num_groups * off.envs_per_actor == 2 * off.envs_per_actor * num_cores()


def test_a_learner_that_makes_several_passes_shares_its_machine_with_fewer_workers():
    def num_servers(*args):
        return parse(polybeast.Flags, ["--env", "Mock", *args]).num_servers

    assert num_servers() == num_cores()
    assert num_servers("--num_passes", "1") == num_cores() + 1
    assert num_servers("--num_servers", "7") == 7


def test_float_actions_have_settings_of_their_own():
    floats = dataclasses.replace(VECTOR, action=ArraySpec("float32", (2,), -1.0, 1.0))
    assert recipes.find(EnvOptions("remote"), "default", spec=floats) == recipes.FLOAT_ACTIONS
    pictures = dataclasses.replace(IMAGE, action=floats.action)
    found = recipes.find(EnvOptions("remote"), "default", spec=pictures)
    assert found == recipes.IMAGE_FLOAT_ACTIONS | recipes.FAST_CONVOLUTIONS
