"""Training with environments elsewhere, as users run it: what is killed is restarted."""

import signal
import sys

import psutil
import pytest

from tests.helpers.training import (
    MORE_THAN_IS_ON_ITS_WAY,
    ROOT,
    TIMEOUT_S,
    Background,
    RemoteEnvironments,
    Training,
    listening_at,
    mean_return,
    read_connections,
    read_logs,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(TIMEOUT_S + 60)]

FOR_EVER = ("--env", "Catch", "--total_steps", "100000000")


def start_learner(tmp_path, address, dials, *args):
    where = "--server_addresses" if dials else "--listen"
    return Training("polybeast_learner", tmp_path, *FOR_EVER, where, address, *args)


def start_environments(tmp_path, address, learner_dials):
    """One process: if it is not restarted, nothing goes on."""
    base = address.removesuffix(".0")
    where = ("--pipes_basename", base) if learner_dials else ("--connect", address)
    return RemoteEnvironments(tmp_path, "--env", "Catch", "--num_servers", "1", *where)


def learn_on(training):
    training.wait_for_step(training.step + MORE_THAN_IS_ON_ITS_WAY)


def connections(training):
    """From whom something was learnt lately."""
    rows = read_connections(training.folder)
    return [row for row in rows if row["share"] == "1.000" and int(row["environments"]) > 0]


def num_streams(training):
    return sum(int(row["streams"] or 0) for row in read_connections(training.folder))


def gateway_of(training):
    [gateway] = [p for p in training.family() if "libtorchbeast.rpc.gateway" in p.cmdline()]
    return gateway


@pytest.mark.parametrize("learner_dials", [False, True], ids=["listens", "dials"])
def test_kill_9_of_environments_and_gateway_is_survived(tmp_path, learner_dials):
    address = f"unix:{tmp_path}/socket.0"
    with start_learner(tmp_path, address, learner_dials) as training:
        training.wait_for(lambda: len(training.family()) == 2, "gateway")
        with start_environments(tmp_path, address, learner_dials) as environments:
            training.wait_for_step(1)
            for times in (1, 2):
                kill(environments.family()[1])
                environments.wait_for(
                    lambda n=times: (
                        environments.output.count("killed by SIGKILL; restarting it") == n
                    ),
                    "message",
                )
                learn_on(training)
                kill(gateway_of(training))
                training.wait_for(
                    lambda n=times: training.output.count("was killed by SIGKILL") == n, "message"
                )
                learn_on(training)
            for program in (training, environments):  # lanes go on without a gateway
                program.wait_for(lambda p=program: len(p.family()) == 2, "process")
            assert training.end(signal.SIGTERM) == 0
            assert environments.end(signal.SIGTERM) == 0
            assert "Traceback" not in training.output + environments.output
    assert not list(tmp_path.glob("socket*"))


@pytest.mark.parametrize("learner_dials", [False, True], ids=["listens", "dials"])
def test_environments_wait_for_a_learner_and_for_the_next_one(tmp_path, learner_dials):
    address = f"unix:{tmp_path}/socket.0"
    with start_environments(tmp_path, address, learner_dials) as environments:
        environments.wait_for(lambda: len(environments.family()) == 2, "process")
        family = environments.family()
        args = (address, learner_dials, "--checkpoint_interval_s", "0.5")
        with start_learner(tmp_path, *args) as training:
            training.wait_for((training.folder / "model.tar").exists, "checkpoint")
            learn_on(training)
            assert training.end(signal.SIGKILL) == -signal.SIGKILL
            (training.folder / "connections.csv").unlink(missing_ok=True)
        with start_learner(tmp_path, *args) as training:
            training.wait_for(lambda: "Resuming at step" in training.output, "resumption")
            training.wait_for_step(1)
            learn_on(training)
            training.wait_for(lambda: connections(training), "line in connections.csv")
            assert training.end(signal.SIGTERM) == 0
        assert environments.family() == family
        assert environments.end(signal.SIGTERM) == 0
        assert "Traceback" not in environments.output
    assert not list(tmp_path.glob("socket*"))


def test_sigterm_lets_clients_wait_for_the_next_learner(tmp_path):
    """Environments and simulators at a port: none of them fails, and none starts anew."""
    with start_learner(tmp_path, "127.0.0.1:0", False) as training:
        address = training.wait_for(lambda: listening_at(training), "address")
        program = [sys.executable, "-m", "tests.helpers.episodes", address, "2", "stay"]
        with (
            start_environments(tmp_path, address, False) as environments,
            Background(program, tmp_path / "simulators", cwd=ROOT) as simulators,
        ):
            training.wait_for(lambda: num_streams(training) == 4, "all streams")
            family = environments.family()
            training.wait_for_step(1)
            learn_on(training)
            assert training.end(signal.SIGTERM) == 0
            environments.wait_for(
                lambda: "The learner is ending; try again later. Dialing" in environments.output,
                "message",
            )
            (training.folder / "connections.csv").unlink()
            with start_learner(tmp_path, address, False) as second:
                second.wait_for(lambda: "Resuming at step" in second.output, "resumption")
                second.wait_for_step(1)
                second.wait_for(lambda: num_streams(second) == 4, "all streams")
                learn_on(second)
                assert environments.family() == family
                assert simulators.process.poll() is None
                assert second.end(signal.SIGTERM) == 0
            assert environments.end(signal.SIGTERM) == 0
            assert simulators.end(signal.SIGTERM) == -signal.SIGTERM
            assert "refused these environments" not in environments.output
            assert "Traceback" not in environments.output + simulators.output


def test_simulators_that_leave_after_each_episode_teach_as_well_as_those_that_stay(tmp_path):
    steps = {}
    for how in ("stay", "leave"):
        (tmp_path / how).mkdir()
        steps[how] = steps_until_catch_is_learnt(tmp_path / how, how)
    assert steps["leave"] < 3 * steps["stay"], steps


def steps_until_catch_is_learnt(folder, how):
    """With eight simulators; fails if it takes more than --total_steps."""
    args = ("--env", "Catch", "--total_steps", "100000", "--listen", "127.0.0.1:0",
            "--unroll_length", "16", "--batch_size", "32", "--num_minibatches", "4",
            "--connections_per_s", "1000")  # fmt: skip
    with Training("polybeast_learner", folder, *args) as training:
        address = training.wait_for(lambda: listening_at(training), "address")
        program = [sys.executable, "-m", "tests.helpers.episodes", address, "8", how]
        with Background(program, folder / "simulators", cwd=ROOT) as simulators:
            training.wait_for_step(1)
            training.wait_for(lambda: mean_return(training) > 0.9, "mean return of 0.9")
            last = read_logs(training.folder)[-1]
            # The last rollouts of those that stay are padded, too, but not one for each episode.
            assert (float(last["padded_rollouts"]) > 100) == (how == "leave")
            assert simulators.end(signal.SIGTERM) == -signal.SIGTERM
            assert not simulators.output
        assert training.end(signal.SIGTERM) == 0
        assert "refused" not in training.output
    return int(last["step"])


def kill(process: psutil.Process) -> None:
    process.kill()
    process.wait(30)
