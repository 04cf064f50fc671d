"""The clients in examples/ are built, keep the protocol's rules, and train an agent together."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile

import numpy as np
import pytest

from libtorchbeast.rows import Spec
from libtorchbeast.rpc import env_pb2 as pb
from libtorchbeast.rpc.handshake import Greeting, Hello
from libtorchbeast.rpc.messages import encode_greeting
from libtorchbeast.rpc.security import Security
from libtorchbeast.rpc.step_messages import encode_actions, encode_step
from libtorchbeast.specs import ArraySpec, discrete
from tests.helpers.certificates import Certificates
from tests.helpers.examples import ROOT, build_cpp_client, install_js_client, load
from tests.helpers.threads import wait_until
from tests.helpers.training import Training

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("examples"),  # one build of the clients for all
    pytest.mark.timeout(600),  # packages may have to be installed first
]

CONFORMANCE_S = 240

conformance_script = load("conformance")
conformance_rules = load("conformance_rules")

# Introduces itself twice, does not wait, calls again at once, and will not be told to end.
NAUGHTY = """
import os, signal, sys
import grpc
from libtorchbeast.rows import Spec
from libtorchbeast.specs import ArraySpec, discrete
from libtorchbeast.rpc.handshake import Hello
from libtorchbeast.rpc.messages import encode_hello, token_metadata
signal.signal(signal.SIGTERM, signal.SIG_IGN)
spec = Spec(ArraySpec("float32", (2,)), discrete(3))
hello = encode_hello(Hello("naughty", 1, spec))
metadata = token_metadata(os.environ["TORCHBEAST_TOKEN"])
while True:
    with grpc.insecure_channel(sys.argv[1]) as channel:
        play = channel.stream_stream("/torchbeast.v1.Learner/Play")
        call = play(iter([hello, hello]), metadata=metadata)
        try:
            list(call)
        except grpc.RpcError:
            pass
"""


class Conformance:
    """A run of the script, in the background: it waits for most of its time."""

    def __init__(self, client, *options):
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115
        script = [sys.executable, str(ROOT / "examples" / "conformance.py")]
        self.process = subprocess.Popen(
            [*script, "--listen", "127.0.0.1:0", *options, "--", *client],
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )

    def finish(self):
        """The exit code, and what was printed."""
        code = self.process.wait(CONFORMANCE_S)
        self._output.seek(0)
        return code, self._output.read()

    def close(self):
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(10)
        self._output.close()


@pytest.fixture(scope="module")
def conformance():
    """Starts runs, and ends those that nobody waited for."""
    started = []

    def start(*args):
        started.append(Conformance(*args))
        return started[-1]

    yield start
    for it in started:
        it.close()


@pytest.fixture(scope="module")
def python_run(conformance):
    args = "--env MountainCar-v0 --num_servers 1 --envs_per_server 5 --connect {address}"
    return conformance([sys.executable, "-m", "torchbeast.polybeast_env", *args.split()])


@pytest.fixture(scope="module")
def naughty_run(conformance):
    return conformance([sys.executable, "-c", NAUGHTY, "{address}"])


@pytest.fixture(scope="module")
def cpp_client():
    return build_cpp_client()


@pytest.fixture(scope="module")
def js_client(tmp_path_factory):
    return install_js_client(tmp_path_factory.mktemp("js_client"))


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return Certificates.make(tmp_path_factory.mktemp("certificates"))


def tls_flags(certificates, name):
    """For either end, with a certificate of its own."""
    files = {"--tls_ca": "ca.pem", "--tls_cert": f"{name}.pem", "--tls_key": f"{name}.key"}
    return [part for flag, file in files.items() for part in (flag, str(certificates.path(file)))]


def check_over_tls(conformance, certificates, client):
    code, output = conformance(
        [*client, "--connect", "{address}", "--tls_ca", str(certificates.path("ca.pem"))],
        "--tls_cert",
        str(certificates.path("learner.pem")),
        "--tls_key",
        str(certificates.path("learner.key")),
    ).finish()
    assert code == 0, output
    assert "All checks passed." in output
    [num_truncated] = re.findall(r"truncated: (\d+)", output)
    assert int(num_truncated) > 0, "time limits were never tried"


def test_the_client_in_cpp_keeps_the_rules_over_tls(
    python_run, naughty_run, conformance, certificates, cpp_client
):
    # The first two run meanwhile.
    check_over_tls(conformance, certificates, cpp_client)


def test_the_client_in_javascript_keeps_the_rules_over_tls(conformance, certificates, js_client):
    check_over_tls(conformance, certificates, js_client)


def test_the_client_in_python_keeps_the_rules(python_run):
    code, output = python_run.finish()
    assert code == 0, output


def test_a_client_that_breaks_rules_is_told_which(naughty_run):
    code, output = naughty_run.finish()
    assert code == 1, output
    for line in (
        "FAIL  waits for the Greeting: the client must wait for the Greeting, got another message",
        "FAIL  does not hammer when it is refused with FAILED_PRECONDITION: at most 6 calls",
        "FAIL  does not hammer when it is refused with UNAUTHENTICATED: at most 6 calls",
        "says nothing: the client still runs 10 s after SIGTERM",
    ):
        assert line in output, output


def test_a_mistake_is_one_sentence(conformance):
    code, output = conformance(["true"], "--listen", "unix:/nowhere").finish()
    assert code == 2
    assert output == "error: listen must be host:port here, got unix:/nowhere.\n"


def test_sigterm_ends_the_client_that_is_being_tried_too(conformance, tmp_path):
    path = tmp_path / "pid"
    told = f"echo $$ > {path}.part && mv {path}.part {path} && exec sleep 600"
    run = conformance(["sh", "-c", told])
    wait_until(path.exists, 60)
    pid = int(path.read_text())
    try:
        run.process.terminate()
        assert run.process.wait(20) == 128 + signal.SIGTERM
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_an_episode_may_be_truncated_right_after_the_stream_before_it_broke():
    def encode(reward, done, count, truncated):
        return encode_step(
            {
                "frame": np.zeros((1, 2), np.float32),
                "reward": np.array([reward], np.float32),
                "done": np.array([done]),
                "episode_step": np.array([count], np.int32),
                "episode_return": np.array([count], np.float32),
                "truncated": np.array([truncated]),
            }
        )

    def check(steps, is_new):
        rules = conformance_rules.StepRules(hello, is_new=is_new)
        for step in steps:
            rules.check(encode(*step))

    spec = Spec(ArraySpec("float32", (2,)), discrete(3))
    hello = Hello("test", 1, spec)
    truncated = (0.0, True, 200, True)
    steps = [(0.0, True, 0, False), truncated, (1.0, False, 1, False), (1.0, True, 2, False)]
    check(steps, is_new=False)
    sentence = "Step {}, environment 0: truncated must follow an ordinary Step, got it after done"
    with pytest.raises(conformance_rules.BrokenRule, match=sentence.format(1)):
        check(steps, is_new=True)
    with pytest.raises(conformance_rules.BrokenRule, match=sentence.format(2)):
        check([*steps[:2], truncated], is_new=False)
    with pytest.raises(conformance_rules.BrokenRule, match="reward of a truncated environment"):
        check([steps[0], (1.0, True, 200, True)], is_new=False)


@pytest.fixture(params=["cpp", "js"])
def client(request):
    return request.getfixturevalue(f"{request.param}_client")


def test_another_machine_is_not_dialled_in_the_clear(client):
    result = subprocess.run([*client, "--connect", "learner:1"], stderr=subprocess.PIPE, timeout=30)
    assert result.returncode == 2
    assert b"Dialing another machine needs --tls_ca and a token" in result.stderr


@contextlib.contextmanager
def first_words(command):
    """What a client says on stderr; it is ended after the block."""
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        yield process.stderr
    finally:
        process.kill()
        process.communicate(timeout=10)


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ("--tls_cert x", "--tls_cert and --tls_key belong together, got only one; give both."),
        ("--tls_key x", "--tls_cert and --tls_key belong together, got only one; give both."),
        ("--tls_cert x --tls_key x", "--tls_cert needs --tls_ca, got none; give both."),
        (
            "--tls_ca /dev/null --tls_cert /no/file --tls_key /no/file",
            "--tls_cert must be a file that can be read, got /no/file.",
        ),
    ],
)
def test_half_given_certificates_are_one_sentence(client, args, sentence):
    result = subprocess.run([*client, *args.split()], stderr=subprocess.PIPE, timeout=30, text=True)
    assert (result.returncode, result.stderr) == (2, f"error: {sentence}\n")


def test_a_learner_that_asks_for_certificates_lets_in_who_has_one(client, certificates):
    security = Security(
        tls_ca=certificates.path("ca.pem"),
        tls_cert=certificates.path("learner.pem"),
        tls_key=certificates.path("learner.key"),
        tls_client_certs=True,
    )
    learner = conformance_script.Learner("127.0.0.1:0", security)
    learner.start()
    command = [*client, "--connect", learner.address, "--tls_server_name", "learner"]
    try:
        with first_words([*command, "--tls_ca", security.tls_ca]) as words:
            assert "No learner at" in words.readline()
            assert learner.forget_streams() == 0
        with first_words([*command, *tls_flags(certificates, "worker")]) as words:
            learner.accept(60).write(encode_greeting(Greeting("test")))
            assert "Playing with the learner" in words.readline()
    finally:
        learner.stop()


def test_ctrl_c_ends_a_client_that_finds_no_learner(client):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = "127.0.0.1:" + str(taken.getsockname()[1])
    process = subprocess.Popen([*client, "--connect", address], stderr=subprocess.PIPE, text=True)
    try:
        assert f"No learner at {address}" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=10)
    finally:
        process.kill()
        process.wait(10)
    assert process.returncode == 130


def test_an_environment_that_cannot_go_on_says_why(client):
    learner = conformance_script.Learner("127.0.0.1:0", Security())
    learner.start()
    command = [*client, "--connect", learner.address, "--num_envs", "2"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        stream = learner.accept(60)
        stream.read("a Hello")
        stream.write(encode_greeting(Greeting("test")))
        stream.read("a Step")
        stream.write(encode_actions(np.array([0, 99])))
        failure = pb.EnvironmentMessage.FromString(stream.read("a Failure")).failure
        stream.end()
        _, error = process.communicate(timeout=10)
    finally:
        process.kill()
        process.wait(10)
        learner.stop()
    assert "There is no action 99." in failure.text
    assert "There is no action 99." in error
    assert process.returncode == 1


PYTHON = "-m torchbeast.polybeast_env --num_servers 1 --envs_per_server 5"
MASK = {"observation": ArraySpec("float32", (2,)), "action_mask": ArraySpec("bool", (3,))}
AIM = Spec(ArraySpec("float32", (2,)), ArraySpec("float32", (2,), -1.0, 1.0))
BOARD = {"observation": ArraySpec("float32", (9,), -1, 1), "action_mask": ArraySpec("bool", (9,))}


@pytest.mark.parametrize(
    ("language", "args", "spec"),
    [
        ("cpp", "--task masked_walk", Spec(MASK, discrete(3))),
        ("js", "--task masked_balance", Spec(MASK, discrete(3))),
        ("python", "--env examples.tic_tac_toe:TicTacToe", Spec(BOARD, discrete(9))),
        ("cpp", "--task aim", AIM),
        ("js", "--task aim", AIM),
    ],
)
def test_masked_actions_and_floats_are_played_in_all_languages(request, language, args, spec):
    command = [sys.executable, *PYTHON.split()]
    if language != "python":
        command = request.getfixturevalue(f"{language}_client")
    learner, random = (
        conformance_script.Learner("127.0.0.1:0", Security()),
        np.random.default_rng(1),
    )
    learner.start()
    # A client that gets a masked action ends with a Failure, which breaks a rule.
    command = [*command, *args.split(), "--connect", learner.address]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        stream = learner.accept(60)
        hello = conformance_rules.check_hello(stream.read("a Hello"), stream.token, "")
        assert hello.spec == spec
        stream.write(encode_greeting(Greeting("test")))
        rules = conformance_rules.StepRules(hello)
        rules.check(stream.read("the first Step"))
        for _ in range(100):
            stream.write(conformance_rules.choose_actions(hello, random, rules.mask))
            rules.check(stream.read("a Step"))
        assert rules.num_episodes > 5
        assert (rules.mask is None) == (spec == AIM)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait(10)
        learner.stop()


def test_an_unknown_task_is_one_sentence(client):
    command = [*client, "--task", "chess"]
    result = subprocess.run(command, stderr=subprocess.PIPE, timeout=30, text=True)
    assert result.returncode == 2
    assert re.fullmatch(r"error: --task must be \w+, \w+ or aim, got chess\.\n", result.stderr)


def test_clients_in_two_languages_train_an_agent_together(
    certificates, cpp_client, js_client, tmp_path
):
    args = ("--env", "remote", "--listen", "127.0.0.1:0", "--total_steps", "1000000")
    args += (*tls_flags(certificates, "learner"), "--tls_client_certs")
    with Training("polybeast_learner", tmp_path, *args) as training:
        pattern = r"Environments can dial in at (\S+)\."
        training.wait_for(lambda: re.search(pattern, training.output), "port")
        address = re.search(pattern, training.output)[1]
        dial = ("--connect", address, *tls_flags(certificates, "worker"))
        clients = [
            subprocess.Popen([*client, *dial], stderr=subprocess.PIPE, text=True)
            for client in (cpp_client, js_client)
        ]
        try:
            training.wait_for_step(4000)
            for client in clients:
                assert client.poll() is None
                client.send_signal(signal.SIGTERM)
            for client in clients:
                _, error = client.communicate(timeout=30)
                assert client.returncode == 0, error
                # 8 environments each; the learner takes from both.
                assert int(re.search(r"Played (\d+) steps", error)[1]) >= 100, error
        finally:
            for client in clients:
                client.kill()
                client.wait(10)
        assert training.end(signal.SIGTERM) == 0
