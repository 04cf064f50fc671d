"""Training with actors that carry the model, as users run it."""

import signal

import pytest

from tests.helpers.training import (
    TIMEOUT_S,
    RemoteActors,
    Training,
    listening_at,
    mean_return,
    read_connections,
)
from torchbeast import polybeast_actor

pytestmark = pytest.mark.timeout(TIMEOUT_S + 60)

ENV = ("--env", "Catch", "--total_steps", "100000000")
# If it is not restarted, nothing goes on.
ONE_ACTOR = ("--env", "Catch", "--num_actors", "1", "--envs_per_actor", "32")
NAME = "Catch actor 0"


def connections(training):
    return {row["name"]: row for row in read_connections(training.folder)}


def learnt_lately(training, num_steps):
    """The actor's row, if it says so; without a lag, nothing was learnt since the row before."""
    row = connections(training).get(NAME)
    return row if row and row["lag"] and int(row["steps"]) > num_steps else None


@pytest.mark.slow
def test_catch_is_learnt_with_actors_alone_in_bfloat16_though_actor_and_gateway_are_killed(
    tmp_path,
):
    """The learner computes in float32: what the actor's numerics change, V-trace corrects."""
    address = f"unix:{tmp_path}/socket"
    bf16 = ("--autocast", "bf16", "--weights_dtype", "bf16")
    with (
        Training("polybeast_learner", tmp_path, *ENV, "--listen", address) as training,
        RemoteActors(tmp_path, *ONE_ACTOR, "--connect", address, *bf16) as actors,
    ):
        training.wait_for_step(4000)
        [victim] = [p for p in actors.family() if "torchbeast.run.remote_actor" in p.cmdline()]
        victim.kill()
        actors.wait_for(lambda: "killed by SIGKILL; restarting it" in actors.output, "message")
        [gateway] = [p for p in training.family() if "libtorchbeast.rpc.gateway" in p.cmdline()]
        gateway.kill()
        training.wait_for(lambda: "was killed by SIGKILL" in training.output, "message")
        training.wait_for(lambda: mean_return(training) >= 0.9, "mean return of 0.9")
        row = training.wait_for(lambda: learnt_lately(training, 4000), "steps")
        assert float(row["lag"]) <= 1.0, "with --hold_actors"
        assert training.end(signal.SIGTERM) == 0
        actors.wait_for(lambda: "is ending; try again later" in actors.output, "message")
        assert actors.end(signal.SIGTERM) == 0
        assert "Traceback" not in training.output + actors.output


@pytest.mark.slow
def test_actors_and_the_learners_own_environments_are_learnt_from_side_by_side(tmp_path):
    own = ("--num_servers", "1", "--num_actors", "1", "--envs_per_actor", "16")
    args = (*ENV, *own, "--unroll_length", "8", "--listen", "127.0.0.1:0")
    with Training("polybeast", tmp_path, *args) as training:
        address = training.wait_for(lambda: listening_at(training), "address")
        with RemoteActors(tmp_path, *ONE_ACTOR, "--connect", address) as actors:
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
