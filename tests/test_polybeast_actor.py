"""Training with actors that carry the model, as users run it."""

import csv
import signal
import sys

import pytest

from tests.helpers.training import TIMEOUT_S, Background, Training, mean_return
from torchbeast import polybeast_actor

pytestmark = pytest.mark.timeout(TIMEOUT_S + 60)

ENV = ("--env", "Catch", "--total_steps", "100000000")
ONE = ("--num_actors", "1", "--envs_per_actor", "32")  # if it is not restarted, nothing goes on
NAME = "Catch actor 0"


class Actors(Background):
    """`polybeast_actor` in the background."""

    def __init__(self, folder, *args):
        program = [sys.executable, "-m", "torchbeast.polybeast_actor", "--env", "Catch"]
        super().__init__([*program, *args], folder / "actors")


def connections(training):
    path = training.folder / "connections.csv"
    rows = csv.DictReader(path.read_text().splitlines()) if path.exists() else []
    return {row["name"]: row for row in rows}


@pytest.mark.slow
def test_catch_is_learnt_with_actors_alone_in_bfloat16_though_actor_and_gateway_are_killed(
    tmp_path,
):
    """The learner computes in float32: what the actor's numerics change, V-trace corrects."""
    address = f"unix:{tmp_path}/socket"
    bf16 = ("--autocast", "bf16", "--weights_dtype", "bf16")
    with (
        Training("polybeast_learner", tmp_path, *ENV, "--listen", address) as training,
        Actors(tmp_path, "--connect", address, *ONE, *bf16) as actors,
    ):
        training.wait_for_step(4000)
        [victim] = [p for p in actors.family() if "torchbeast.run.remote_actor" in p.cmdline()]
        victim.kill()
        actors.wait_for(lambda: "killed by SIGKILL; restarting it" in actors.output, "message")
        [gateway] = [p for p in training.family() if "libtorchbeast.rpc.gateway" in p.cmdline()]
        gateway.kill()
        training.wait_for(lambda: "was killed by SIGKILL" in training.output, "message")
        training.wait_for(lambda: mean_return(training) >= 0.9, "mean return of 0.9")
        training.wait_for(
            lambda: int(connections(training).get(NAME, {"steps": 0})["steps"]) > 4000, "steps"
        )
        assert float(connections(training)[NAME]["lag"]) <= 1.0, "with --hold_actors"
        assert training.end(signal.SIGTERM) == 0
        actors.wait_for(lambda: "is ending; try again later" in actors.output, "message")
        assert actors.end(signal.SIGTERM) == 0
        assert "Traceback" not in training.output + actors.output


@pytest.mark.slow
def test_actors_and_the_learners_own_environments_are_learnt_from_side_by_side(tmp_path):
    own = ("--num_servers", "1", "--num_actors", "1", "--envs_per_actor", "16")
    args = (*ENV, *own, "--unroll_length", "8", "--listen", "127.0.0.1:0")
    with Training("polybeast", tmp_path, *args) as training:
        said = "Environments can dial in at "
        training.wait_for(lambda: said in training.output, "address")
        address = training.output.split(said)[1].split()[0].rstrip(".")
        with Actors(tmp_path, "--connect", address, *ONE) as actors:
            both = {NAME, "(the learner's own)"}

            def are_learnt_from():
                rows = connections(training)
                return rows.keys() == both and all(int(r["steps"]) > 500 for r in rows.values())

            training.wait_for(are_learnt_from, "steps of both")
            assert training.end(signal.SIGTERM) == 0
            assert actors.end(signal.SIGTERM) == 0
            assert "Traceback" not in training.output + actors.output


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ((), "--connect must be the address of a learner that listens, got none"),
        (("--connect", "192.0.2.7:1"), "give tls_ca, or insecure"),
        (("--connect", "unix:/x", "--num_actors", "0"), "num_actors must be more than 0, got 0."),
        (("--connect", "unix:/x", "--model", "deeper"), "--model must be auto, "),
        (("--connect", "unix:/x", "--env", "Catsch"), "Catsch"),
    ],
)
def test_flags_that_cannot_work_are_one_sentence(args, sentence, capsys):
    env = () if "--env" in args else ("--env", "Catch")
    assert polybeast_actor.main([*env, *args]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1
