"""`torchbeast.train` in a script, a notebook, a thread: the same as on the command line."""

import signal
import sys
import threading
from pathlib import Path

import gymnasium
import pytest
from torch import nn

import torchbeast
from tests.helpers import tasks, training
from tests.helpers.saved_run import save_run
from torchbeast.errors import UsageError
from torchbeast.run.signals import StopRequest

PROGRAM = Path(__file__).parent / "helpers" / "python_program.py"


class Program(training.Training):
    """The program of a user's own, in the background."""

    def __init__(self, savedir, beast, how):
        self.folder = savedir / "run"
        command = [sys.executable, str(PROGRAM), beast, str(savedir), how]
        training.Background.__init__(self, command, savedir / "output")


@pytest.mark.slow
@pytest.mark.timeout(training.TIMEOUT_S + 30)
@pytest.mark.parametrize(("beast", "how"), [("poly", "loop"), ("mono", "thread")])
def test_classes_of_the_main_module_are_trained_played_and_resumed(beast, how, tmp_path):
    with Program(tmp_path, beast, how) as program:
        assert program.process.wait(training.TIMEOUT_S) == 0, program.output
    result, answers = program.output.splitlines()[-2:]
    _, name, step, success = result.split()
    assert (name, answers) == ("run", "ACTIONS [5, 6, 5] RETURNS [10.0, 10.0]"), program.output
    assert 32_000 <= float(step) < 34_000
    assert float(success) > 0.9
    assert "Resuming at step 30," in program.output


@pytest.mark.slow
@pytest.mark.timeout(training.TIMEOUT_S + 30)
@pytest.mark.parametrize(
    ("beast", "number", "code"), [("poly", signal.SIGINT, -2), ("mono", signal.SIGTERM, 0)]
)
def test_a_signal_saves_and_then_ends_the_program(beast, number, code, tmp_path):
    with Program(tmp_path, beast, "for ever") as program:
        program.wait_for_step(1)
        assert program.end(number) == code
        assert f"Stopped by {number.name}" in program.output
        assert "RESULT" not in program.output
        assert ("KeyboardInterrupt" in program.output) == (number == signal.SIGINT)
    assert (program.folder / "model.tar").exists()


CELLS = [
    PROGRAM.read_text()
    .split("\nrandom.seed(3)\n")[0]
    .replace("sys.argv[1:]", "('poly', SAVEDIR, 'lambda')"),
    "run = train(30_000)",
    "print(torchbeast.Agent.load(run.rundir, model=Net).act([1.0, 1.0]))",
]


@pytest.mark.slow
@pytest.mark.timeout(training.TIMEOUT_S)
def test_classes_of_a_notebook_are_trained(tmp_path):
    pytest.importorskip("ipykernel")
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    sources = [f"SAVEDIR = {str(tmp_path)!r}", *CELLS]
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    book = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(book, timeout=200, kernel_name="python3").execute()
    train, act = ("".join(out["text"] for out in cell.outputs) for cell in book.cells[-2:])
    assert "step 30," in train
    assert act == "6\n"
    assert (tmp_path / "run" / "model.tar").exists()


def train(tmp_path, env="Catch", **options):
    return torchbeast.train(env, savedir=tmp_path, xpid="run", **options)


class NotPicklable:
    """Holds what no other process can have."""

    def __init__(self):
        self.lock = threading.Lock()

    def __call__(self):
        return tasks.Corridor()


MISTAKES = {
    r"env must be a name, or a class or function .* got <.*CartPole": {
        "env": gymnasium.make("CartPole-v1")
    },
    r"model must be a name, or a class or function .* got Linear": {"model": nn.Linear(1, 1)},
    r"beast must be poly or mono, got 'duo'": {"beast": "duo"},
    r"There is no flag 'total_step': did you mean total_steps": {"total_step": 5},
    r"total_steps must be more than 0, got 0": {"total_steps": 0},
    r"train\(\) trains, got mode 'test'": {"mode": "test"},
    r"Two different objects are called tests.test_api:<lambda>": {
        "env": lambda: None,
        "model": lambda: None,
    },
    r"NotPicklable cannot be handed to other processes .*lock": {"env": NotPicklable()},
    r"No environment is called 'Katch'": {"env": "Katch"},
}


@pytest.mark.parametrize("sentence", MISTAKES)
def test_a_mistake_is_one_sentence_and_starts_nothing(sentence, tmp_path):
    with pytest.raises(UsageError, match=sentence):
        train(tmp_path, **MISTAKES[sentence])
    assert not (tmp_path / "run").exists()


def test_a_run_needs_its_code_again(tmp_path):
    save_run(tmp_path, env="tests.helpers.tasks:Corridor")
    with pytest.raises(UsageError, match=r"pass it, too: env=... \(it was tests.helpers.tasks:Cor"):
        torchbeast.train(savedir=tmp_path, xpid="run", total_steps=2)
    with pytest.raises(UsageError, match=r"was trained with --env .*got Catch"):
        train(tmp_path, "Catch", beast="mono", total_steps=200)


def test_signals_are_left_alone_outside_of_the_main_thread():
    before = signal.getsignal(signal.SIGINT)
    failures = []

    def enter():
        try:
            with StopRequest() as stop:
                assert stop.signal is None
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join(10)
    assert not failures
    assert signal.getsignal(signal.SIGINT) is before


def test_names_are_exported_when_they_are_asked_for():
    for name in torchbeast.__all__:
        assert getattr(torchbeast, name).__name__ == name
    assert set(torchbeast.__all__) <= set(dir(torchbeast))
    with pytest.raises(AttributeError, match="no attribute 'taught'"):
        torchbeast.taught  # noqa: B018
