"""Flags given by a Python program."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from torchbeast import monobeast, polybeast
from torchbeast.errors import UsageError
from torchbeast.run.api_arguments import check_values
from torchbeast.run.flags import given_flags


def test_values_have_the_types_of_the_command_line():
    given = {
        "total_steps": 1e6,
        "learning_rate": 1,
        "batch_size": np.int64(4),
        "savedir": "/tmp/runs",
        "use_lstm": True,
        "num_actors": None,
        "env_kwargs": {"size": 8},
        "imports": ["a", "b.c"],
        "recipe": "paper",
    }
    line = ["--total_steps", "1000000", "--learning_rate", "1", "--batch_size", "4", "--use_lstm"]
    line += ["--savedir", "/tmp/runs", "--num_actors", "None", "--import", "a,b.c"]
    line += ["--recipe", "paper"]
    values = check_values(polybeast.Flags, given)
    assert values == given_flags(polybeast.Flags, [*line, "--env_kwargs", '{"size": 8}'])
    assert [type(values[name]) for name in ("total_steps", "learning_rate", "batch_size")] == [
        int,
        float,
        int,
    ]


def test_the_default_of_every_flag_is_a_value_of_it():
    for beast in (monobeast, polybeast):
        defaults = {f.name: getattr(beast.Flags(), f.name) for f in dataclasses.fields(beast.Flags)}
        del defaults["sources"]
        assert check_values(beast.Flags, defaults) == defaults


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"total_stepps": 5}, r"no flag 'total_stepps': did you mean total_steps"),
        ({"sources": {}}, r"no flag 'sources'"),
        ({"batch_size": 2.5}, r"batch_size must be a whole number, got 2.5"),
        ({"batch_size": True}, r"batch_size must be a whole number, got True"),
        ({"batch_size": "8"}, r"batch_size must be a whole number, got '8'"),
        ({"learning_rate": "fast"}, r"learning_rate must be a number, got 'fast'"),
        ({"use_lstm": 1}, r"use_lstm must be True or False, got 1"),
        ({"xpid": 3}, r"xpid must be a string or None, got 3"),
        ({"savedir": 3}, r"savedir must be a path, got 3"),
        ({"recipe": "best"}, r"recipe must be 'default' or 'paper', got 'best'"),
        ({"env_kwargs": {"path": Path()}}, r"env_kwargs must be numbers.* give env a function"),
    ],
)
def test_a_mistake_is_one_sentence(values, sentence):
    with pytest.raises(UsageError, match=sentence):
        check_values(monobeast.Flags, values)
