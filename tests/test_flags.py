"""The command line: known spellings, defaults by environment, mistakes in one sentence."""

import pytest

from tests.helpers.default_flags import default_flags
from torchbeast import monobeast
from torchbeast.core.learner import NothingFinite
from torchbeast.run import recipes
from torchbeast.run.command_line import run_command_line
from torchbeast.run.flags import with_values


def parse(*args):
    seen = []
    code = run_command_line(monobeast.Flags, lambda flags: seen.append(flags) or 0, list(args))
    return seen[0] if seen else code


def test_every_flag_of_torchbeasts_monobeast_is_taken():
    line = """
        --env Catch --mode test --xpid x --disable_checkpoint --savedir /tmp/y --num_actors 4
        --total_steps 100000 --batch_size 8 --unroll_length 80 --num_buffers 128
        --num_learner_threads 2 --disable_cuda --use_lstm --entropy_cost 0.0006
        --baseline_cost 0.5 --discounting 0.99 --reward_clipping none --learning_rate 0.00048
        --alpha 0.99 --momentum 0 --epsilon 0.01 --grad_norm_clipping 40.0
    """
    flags = parse(*line.split())
    assert flags.unroll_length == 80
    assert flags.disable_checkpoint
    assert flags.use_lstm
    assert flags.num_slots == 128
    assert flags.reward_clipping == "none"


def test_the_command_of_torchbeasts_readme_is_taken():
    line = """
        --env PongNoFrameskip-v4 --num_actors 45 --total_steps 30000000 --learning_rate 0.0004
        --epsilon 0.01 --entropy_cost 0.01 --batch_size 4 --unroll_length 80 --num_buffers 60
        --num_threads 4 --xpid example
    """
    flags = parse(*line.split())
    assert flags.num_actors == 45
    assert flags.num_slots >= 60


def test_other_spellings_mean_the_same():
    assert parse("--env", "Catch", "--num_threads", "3").num_learner_threads == 3
    assert parse("--env=Catch", "--num-actors=5").num_actors == 5


def test_defaults_depend_on_the_environment():
    assert parse("--env", "Catch").total_steps == recipes.VECTOR["total_steps"]
    assert parse().total_steps == monobeast.Flags().total_steps
    assert parse("--env", "Catch", "--total_steps", "7").total_steps == 7


def test_the_papers_settings_are_one_flag_away():
    flags = default_flags(monobeast.Flags, "PongNoFrameskip-v4", "paper")
    assert (flags.batch_size, flags.unroll_length, flags.learning_rate) == (32, 20, 0.0006)
    assert parse("--recipe", "paper").batch_size == 32


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("--learning_rate 0.0006", "learning_rate", monobeast.Flags().learning_rate),
        ("--learning-rate=0.5", "learning_rate", 0.5),
        ("--num-threads 2", "num_learner_threads", 2),
        ("--no-use_lstm", "use_lstm", False),
        ("--use-lstm", "use_lstm", True),
        ("--max_policy_lag None", "max_policy_lag", None),
    ],
)
def test_a_flag_that_is_given_is_known_even_if_it_equals_its_default(line, name, value):
    flags = parse("--env", "Catch", *line.split())
    assert getattr(flags, name) == value
    given = {name for name, source in flags.sources.items() if source == "command line"}
    assert given == {"env", name}


def test_the_command_line_outdoes_the_saved_run_and_that_the_recipe():
    flags = monobeast.Flags()
    layers = {
        "command line": {"entropy_cost": 0.3},
        "saved run": {"entropy_cost": 0.2, "baseline_cost": 0.2},
        "recipe": {"entropy_cost": 0.1, "baseline_cost": 0.1, "alpha": 0.1, "no_flag": 0.1},
    }
    for source in ("saved run", "command line", "recipe"):  # whatever is known first
        flags = with_values(flags, source, layers[source])
    assert (flags.entropy_cost, flags.baseline_cost, flags.alpha) == (0.3, 0.2, 0.1)
    sources = {"entropy_cost": "command line", "baseline_cost": "saved run", "alpha": "recipe"}
    assert flags.sources == sources
    assert "sources" not in flags.as_plain_dict()


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ("--env Katch", "did you mean Catch?"),
        ("--env Catch --batch_size 0", "batch_size must be more than 0, got 0"),
        ("--env Catch --discounting 1.5", "discounting must be from 0 to 1, got 1.5"),
        (
            "--env Catch --num_actors 8 --num_buffers 4",
            "num_buffers must exceed num_actors, got 4 <= 8",
        ),
        ("--env Catch --model big", "--model must be auto, shallow, deep, mlp or"),
        ("--env Catch --xpid a/b", "leave out slashes"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(args, sentence, capsys):
    assert parse(*args.split()) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


def test_numbers_that_are_none_are_refused(capsys):
    assert parse("--env", "Catch", "--entropy_cost", "nan") == 2
    assert "entropy_cost must be a number, got nan." in capsys.readouterr().err


def test_gradients_that_stay_infinite_are_one_sentence(capsys):
    def main(flags):
        raise NothingFinite("The gradient must be finite.")

    assert run_command_line(monobeast.Flags, main, ["--env", "Catch"]) == 1
    assert capsys.readouterr().err == "error: The gradient must be finite.\n"
