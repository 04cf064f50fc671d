"""The supervisor: what it starts, restarts, kills, gives up, and what it says about it."""

import errno
import gc
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest

from libtorchbeast import helper_process, log_repeats, supervisor
from libtorchbeast.groups import HEALTHY_STEPS, MAX_REBUILDS
from libtorchbeast.helper_process import Helper
from libtorchbeast.log_repeats import RepeatFilter, without_numbers
from libtorchbeast.output_log import OutputLog
from libtorchbeast.supervisor import (
    CANNOT_WORK,
    HEALTHY_PROGRESS,
    HEALTHY_S,
    MAX_FAILURES,
    MAX_GAP_S,
    MAX_LINE,
    NEVER_WORKED,
    NUM_ACCIDENTS,
    BackOff,
    Child,
    NobodyLeft,
    Supervisor,
    describe_exit,
)
from tests.helpers.threads import wait_until
from tests.helpers.training import ROOT

TIMEOUT_S = 5.0


class Clock:
    """Time that passes when the test says so, or when somebody sleeps."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    module = SimpleNamespace(monotonic=clock.monotonic, sleep=clock.sleep)
    for user in (supervisor, log_repeats):
        monkeypatch.setattr(user, "time", module)
    return clock


class FakeProcess:
    pid = 2**30  # nobody's

    def __init__(self):
        self.code = None
        self.beats = 0
        self.hangs = False
        self.log = []
        self.output = []
        self.is_killed = False

    def exit_code(self):
        return self.code

    def heartbeat(self):
        self.beats += not self.hangs
        return self.beats

    def read_log(self):
        log, self.log = self.log, []
        return log

    def read_output(self):
        output, self.output = self.output, []
        return output

    def kill(self):
        self.is_killed = True
        self.code = -signal.SIGKILL


class Fakes:
    """Children whose processes are fakes; `errors` are raised by the next starts."""

    def __init__(self, number=1, **options):
        self.starts = []
        self.ends = []
        self.errors = []
        self.progress = [0] * number
        children = [self._child(i) for i in range(number)]
        self.supervisor = Supervisor(children, TIMEOUT_S, "--the_timeout", **options)

    def _child(self, i):
        def start(num_starts):
            if self.errors:
                raise self.errors.pop()
            self.starts.append((i, num_starts))
            return FakeProcess()

        def on_end():
            self.ends.append(i)

        return Child(f"Fake {i}", start, on_end, progress=lambda: self.progress[i])

    def __getitem__(self, i):
        return self.supervisor.children[i].process

    def poll_after(self, clock, seconds):
        """Let time pass as it does for somebody who polls often."""
        end = clock.now + seconds
        while clock.now < end:
            clock.sleep(min(0.1, end - clock.now))
            self.supervisor.poll()


def test_all_are_started_and_one_that_dies_is_restarted(clock, caplog):
    fakes = Fakes(2)
    fakes.supervisor.poll()
    assert fakes.starts == [(0, 0), (1, 0)]
    first = fakes[0]
    first.code = -signal.SIGSEGV
    fakes.supervisor.poll()
    assert first.is_killed  # and so what it has started
    assert fakes.ends == [0]
    assert "Fake 0 was killed by SIGSEGV; restarting it." in caplog.text
    fakes.poll_after(clock, 1)
    assert fakes.starts == [(0, 0), (1, 0), (0, 1)]
    assert fakes.supervisor.num_restarts == 1


def test_pauses_before_restarts_grow_until_the_child_works_again(clock):
    fakes = Fakes(2, max_failures=None)
    fakes.supervisor.poll()

    def pause():
        died_at = clock.now
        fakes[0].code = 1
        fakes.supervisor.poll()
        while fakes[0] is None:
            clock.sleep(0.01)
            fakes.supervisor.poll()
        return clock.now - died_at

    pauses = [pause() for _ in range(4)]
    assert all(b > 2 * a for a, b in itertools.pairwise(pauses)), pauses
    fakes.progress[0] += HEALTHY_PROGRESS
    assert pause() < 2 * pauses[0]


def test_who_fails_again_and_again_is_given_up_and_the_others_go_on(clock, caplog):
    fakes = Fakes(2)
    fakes.supervisor.poll()
    for _ in range(MAX_FAILURES):
        fakes[0].code = 1
        fakes.poll_after(clock, 30)
    assert "giving it up after 5 failures in a row" in caplog.text
    assert fakes[0] is None
    assert fakes[1] is not None


def test_when_all_are_given_up_the_last_warning_is_in_the_error(clock):
    fakes = Fakes(1, max_failures=2)
    fakes.supervisor.poll()
    fakes[0].log = [(logging.WARNING, "the simulator is out of tea"), (logging.INFO, "bye")]
    fakes[0].code = 1
    fakes.poll_after(clock, 5)
    fakes[0].code = 1
    with pytest.raises(NobodyLeft, match=r"(?s)is out of tea.*Every fake has failed.*exit code 1"):
        fakes.supervisor.poll()


@pytest.mark.parametrize("number", [1, 3])
def test_when_all_keep_failing_the_end_comes_within_half_a_minute(clock, monkeypatch, number):
    """Pauses take less than half of it, however they fall; the rest is for the starts."""
    monkeypatch.setattr(supervisor.random, "uniform", lambda low, high: high)
    fakes = Fakes(number)
    started_at = clock.now

    def fail_for_ever():
        while True:
            for i in range(number):
                if fakes[i] is not None:
                    fakes[i].code = 1
            clock.sleep(0.1)
            fakes.supervisor.poll()

    with pytest.raises(NobodyLeft):
        fail_for_ever()
    assert len(fakes.starts) == number * MAX_FAILURES
    assert 5 < clock.now - started_at < 15


def false_starts(fakes, clock, i, times, code=NEVER_WORKED):
    for _ in range(times):
        fakes[i].code = code
        fakes.supervisor.poll()
        fakes.poll_after(clock, 20)


def test_who_works_in_the_end_keeps_the_others_going(clock):
    fakes = Fakes(2, max_failures=None, false_start_code=NEVER_WORKED)
    fakes.supervisor.poll()
    false_starts(fakes, clock, 0, MAX_FAILURES)
    fakes.poll_after(clock, HEALTHY_S)
    false_starts(fakes, clock, 1, 3 * MAX_FAILURES)
    assert None not in (fakes[0], fakes[1])


def test_when_nothing_has_ever_worked_it_is_no_use_to_go_on(clock):
    fakes = Fakes(2, max_failures=None, false_start_code=NEVER_WORKED)
    fakes.supervisor.poll()
    false_starts(fakes, clock, 0, 3 * MAX_FAILURES)  # the other one may be waiting for a learner
    false_starts(fakes, clock, 1, MAX_FAILURES)
    fakes[0].log = [(logging.WARNING, "the simulator is out of tea")]
    with pytest.raises(NobodyLeft, match=r"(?s)out of tea.*No environment has ever worked"):
        false_starts(fakes, clock, 0, 1)


@pytest.mark.parametrize("code", [1, -signal.SIGKILL])
def test_what_has_worked_once_is_restarted_for_ever(clock, code):
    fakes = Fakes(2, max_failures=None, false_start_code=NEVER_WORKED)
    fakes.supervisor.poll()
    false_starts(fakes, clock, 0, 1, code)
    for i in (1, 0):
        false_starts(fakes, clock, i, 3 * MAX_FAILURES)
    assert None not in (fakes[0], fakes[1])


def test_failures_with_work_in_between_are_not_in_a_row(clock):
    fakes = Fakes(1)
    fakes.supervisor.poll()
    for _ in range(3 * MAX_FAILURES):
        fakes.progress[0] += HEALTHY_PROGRESS
        fakes[0].code = 1
        fakes.poll_after(clock, 1)
    assert fakes[0] is not None


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE])
def test_a_start_for_which_there_is_no_room_is_tried_for_ever(clock, caplog, number):
    fakes = Fakes(1)
    fakes.errors = [OSError(number, os.strerror(number)) for _ in range(3 * MAX_FAILURES)]
    fakes.poll_after(clock, 10)
    assert 2 <= 3 * MAX_FAILURES - len(fakes.errors) <= 6  # with back-off
    assert "Fake 0 cannot be started" in caplog.text
    fakes.poll_after(clock, 600)
    assert fakes.starts == [(0, 0)]
    assert fakes[0] is not None


def test_a_start_that_can_never_work_is_given_up(clock):
    fakes = Fakes(1)
    fakes.errors = [FileNotFoundError(errno.ENOENT, "no such program") for _ in range(100)]
    with pytest.raises(RuntimeError, match="cannot be started"):
        fakes.poll_after(clock, 600)


def test_a_heartbeat_that_stops_is_a_process_that_hangs(clock, caplog):
    fakes = Fakes(1)
    fakes.supervisor.poll()
    process = fakes[0]
    fakes.poll_after(clock, 10 * TIMEOUT_S)
    process.hangs = True
    fakes.poll_after(clock, 0.8 * TIMEOUT_S)
    assert not process.is_killed
    fakes.poll_after(clock, 0.4 * TIMEOUT_S)
    assert process.is_killed
    assert "Fake 0 has done nothing for 5 s (--the_timeout); restarting it." in caplog.text


def test_who_is_late_is_named_with_what_becomes_of_it(clock):
    fakes = Fakes(4)
    fakes.supervisor.poll()
    assert fakes.supervisor.late() == [f"Fake {i} (starting for 0 s)" for i in range(4)]
    fakes.poll_after(clock, 1)
    assert fakes.supervisor.late() == []
    fakes[1].hangs = True
    fakes[2].code = 1
    fakes.supervisor.children[3].given_up = True
    fakes.poll_after(clock, 0.05)
    assert fakes.supervisor.late() == ["Fake 2 (restarts in a moment)"]
    fakes.poll_after(clock, 4)
    assert fakes.supervisor.late() == [
        "Fake 1 (busy for 4 s, restarted after 5)",
    ]


def test_time_in_which_nobody_polled_is_not_held_against_a_process(clock):
    """The laptop slept, and so did the processes."""
    fakes = Fakes(1)
    fakes.supervisor.poll()
    process = fakes[0]
    process.hangs = True
    clock.sleep(100 * TIMEOUT_S)
    fakes.supervisor.poll()
    assert not process.is_killed
    assert fakes.supervisor.children[0].idle_s == MAX_GAP_S


def test_who_says_that_it_cannot_work_is_not_started_again(clock):
    fakes = Fakes(1, final_code=CANNOT_WORK)
    fakes.supervisor.poll()
    fakes[0].code = CANNOT_WORK
    fakes.poll_after(clock, 100)
    assert fakes.supervisor.cannot_work
    assert fakes.starts == [(0, 0)]
    assert fakes.ends == [0]


def test_what_a_process_logs_is_logged_with_its_name_and_once_a_minute(clock, caplog):
    caplog.set_level(logging.INFO)
    fakes = Fakes(2)
    fakes.supervisor.poll()
    for _ in range(5):
        for process in (fakes[0], fakes[1]):
            process.log = [(logging.WARNING, "no tea")]
        fakes.poll_after(clock, 0.1)
    assert caplog.text.count("no tea") == 1
    assert "Fake 0: no tea" in caplog.text
    assert fakes.supervisor.children[0].last_warning == "no tea"
    clock.sleep(61)
    fakes[1].log = [(logging.WARNING, "no tea")]
    fakes.supervisor.poll()
    assert "Fake 1: no tea (again, 10 times since)" in caplog.text


def test_a_text_that_came_again_is_counted_even_if_it_never_comes_back(clock, caplog):
    fakes = Fakes(1)
    fakes.supervisor.poll()
    for _ in range(5):
        fakes[0].log = [(logging.WARNING, "no tea")]
        fakes.supervisor.poll()
    assert "again" not in caplog.text
    fakes.poll_after(clock, 61)
    assert caplog.text.count("Fake 0: no tea (again, 4 times since)") == 1
    fakes.poll_after(clock, 200)
    assert caplog.text.count("again") == 1


def test_texts_that_differ_in_numbers_alone_are_one(clock, caplog):
    """All environments of a group fail alike, at other steps."""
    fakes = Fakes(1)
    fakes.supervisor.poll()
    traceback = "Environment {0} failed.\n  File x.py, line {1}\nValueError: at step {0}, got 0.{0}"
    fakes[0].log = [(logging.WARNING, traceback.format(i, 7)) for i in range(8)]
    fakes.supervisor.poll()
    assert caplog.text.count("failed.") == 1
    fakes[0].log = [(logging.WARNING, traceback.format(3, 8))]  # another line of the program
    fakes.supervisor.poll()
    assert caplog.text.count("failed.") == 2
    assert without_numbers("step 17 of 3.5") == "step # of #"
    stack = "Fatal Python error\nthread {}\n  File x.py, line 7\n"
    assert without_numbers(stack.format("0x7f6f")) == without_numbers(stack.format("0x012a"))


def test_restarts_that_go_on_and_on_are_logged_a_few_times_and_then_counted(clock, caplog):
    fakes = Fakes(30)
    fakes.supervisor.poll()
    for i in range(30):
        fakes[i].code = 1
    fakes.supervisor.poll()
    assert caplog.text.count("restarting it") == NUM_ACCIDENTS
    fakes.poll_after(clock, 61)
    assert f"Fake 29 ended with exit code 1; restarting it. (again, {30 - NUM_ACCIDENTS} times" in (
        caplog.text
    )


def test_a_process_that_breaks_after_less_than_its_host_allows_is_not_healthy(clock):
    """Its environments fail at every tenth step: it takes 40 steps each time, and never works."""
    most_steps = (MAX_REBUILDS + 1) * HEALTHY_STEPS
    fakes = Fakes(1)
    for _ in range(MAX_FAILURES - 1):
        fakes.supervisor.poll()
        fakes.progress[0] += most_steps
        fakes[0].code = 1
        fakes.poll_after(clock, 15)
    fakes[0].code = 1
    with pytest.raises(NobodyLeft):
        fakes.supervisor.poll()


def test_the_last_that_a_process_printed_is_in_the_report_of_its_end(clock, caplog):
    kept = []
    fakes = Fakes(1, max_failures=2, keep_output=lambda name, lines: kept.append((name, lines)))
    fakes.supervisor.poll()
    fakes[0].output = ["wheels: 4", "libsim: assertion failed: wheels >= 0"]
    fakes[0].code = -signal.SIGABRT
    fakes.supervisor.poll()
    assert kept == [("Fake 0", ["wheels: 4", "libsim: assertion failed: wheels >= 0"])]
    assert "Fake 0 was killed by SIGABRT; restarting it.\nThe last that it printed:" in caplog.text
    assert "libsim: assertion failed" in caplog.text
    fakes.poll_after(clock, 5)
    fakes[0].output = ["libsim: out of tea"]
    fakes[0].code = -signal.SIGABRT
    with pytest.raises(NobodyLeft, match="libsim: out of tea\nEvery fake has failed") as e:
        fakes.supervisor.poll()
    assert "wheels" not in str(e.value)  # of the one before


def test_a_flood_of_different_texts_is_dropped(clock):
    repeats = RepeatFilter(most=3)
    assert [repeats.take(str(i)) for i in range(5)] == ["0", "1", "2", None, None]
    clock.sleep(61)
    assert repeats.take("5") == "5"


def test_what_is_folded_keeps_its_level(clock):
    repeats = RepeatFilter()
    for _ in range(3):
        repeats.take("hello", level=logging.INFO)
    clock.sleep(61)
    assert repeats.overdue() == [(logging.INFO, "hello (again, 2 times since)")]


def test_lines_in_a_report_are_short_and_printable(clock, caplog):
    fakes = Fakes(1, max_failures=2)
    fakes.supervisor.poll()
    fakes[0].output = ["\x1b[2J" + "x" * 10_000, "\x1b[33mWARN: y\x1b[0m"]
    fakes[0].code = 1
    fakes.supervisor.poll()
    [line] = [line for line in caplog.text.splitlines() if "xxx" in line]
    assert line.startswith("?[2Jxxx")
    assert len(line) == MAX_LINE
    assert "WARN: y" in caplog.text.splitlines()


def test_the_end_is_asked_for_and_then_forced(clock, caplog):
    fakes = Fakes(2)
    fakes.supervisor.poll()
    tidy, stubborn = fakes[0], fakes[1]

    def stop():
        tidy.code = 0

    before = clock.now
    fakes.supervisor.close(stop, timeout_s=3.0)
    assert stubborn.is_killed
    assert fakes.ends == [0, 1]
    assert fakes.supervisor.pids == []
    assert 3.0 <= clock.now - before < 4.0
    assert "Fake 1 did not end in time; it is killed." in caplog.text


def test_exits_are_described_for_people():
    assert describe_exit(-signal.SIGKILL) == "was killed by SIGKILL"
    assert describe_exit(-250) == "was killed by signal 250"
    assert describe_exit(7) == "ended with exit code 7"


def test_back_off_has_a_limit_and_is_not_the_same_for_all():
    pauses = [BackOff(0.1, 1.0) for _ in range(50)]
    firsts = {back_off.next_s() for back_off in pauses}
    assert len(firsts) > 1
    assert all(0.075 <= pause <= 0.125 for pause in firsts)
    for _ in range(10):
        last = pauses[0].next_s()
    assert last <= 1.25
    pauses[0].reset()
    assert pauses[0].next_s() <= 0.125


# --- Helper, with real processes ---------------------------------------------------------------


@pytest.fixture
def start():
    helpers = []

    def start(what, **config):
        helpers.append(Helper("tests.helpers.supervised", {"what": what, **config}))
        return helpers[-1]

    yield start
    for helper in helpers:
        helper.kill()


def read_until(helper, text):
    """All that it has logged, as soon as there is such a text among it."""
    records = []

    def found():
        records.extend(helper.read_log())
        return any(text in record[1] for record in records)

    wait_until(found)
    return records


def test_a_helper_beats_and_logs_with_levels_and_tracebacks(start):
    helper = start("work")
    records = read_until(helper, "out of tea")
    assert (logging.INFO, "at work") in records
    level, text = records[-1]
    assert level == logging.WARNING
    assert "Traceback" in text
    assert "supervised.py" in text
    before = helper.heartbeat()
    wait_until(lambda: helper.heartbeat() > before)
    assert helper.exit_code() is None
    helper.terminate()
    wait_until(lambda: helper.exit_code() == -signal.SIGTERM)


def test_how_grpc_reads_in_a_helper_is_up_to_the_user_in_the_end(start, monkeypatch):
    monkeypatch.setenv("GRPC_EXPERIMENTS", "event_engine_client")
    helper = start("work")
    read_until(helper, "at work")
    experiments = psutil.Process(helper.pid).environ()["GRPC_EXPERIMENTS"].split(",")
    assert experiments[-1] == "event_engine_client"
    assert "-event_engine_listener" in experiments


def test_a_version_of_grpc_that_was_not_tried_is_asked_for_nothing(start, monkeypatch):
    monkeypatch.delenv("GRPC_EXPERIMENTS", raising=False)
    monkeypatch.setattr(helper_process, "LAST_TRIED_GRPC", (1, 0))
    helper = start("work")
    read_until(helper, "at work")
    assert "GRPC_EXPERIMENTS" not in psutil.Process(helper.pid).environ()


def test_a_helper_that_crashes_says_where(start):
    helper = start("crash")
    wait_until(lambda: helper.exit_code() is not None)
    assert helper.exit_code() == -signal.SIGSEGV
    ((level, text),) = [record for record in helper.read_log() if "Segmentation" in record[1]]
    assert level == logging.ERROR
    assert "supervised.py" in text


def test_a_helper_that_hangs_says_where_and_is_restarted(caplog):
    child = Child("Helper 0", lambda _: Helper("tests.helpers.supervised", {"what": "hang"}))
    supervisor = Supervisor([child], timeout_s=0.5)
    try:
        supervisor.poll()
        read_until(child.process, "about to hang")

        def is_restarted():
            supervisor.poll()
            return supervisor.num_restarts == 1 and child.process is not None

        wait_until(is_restarted)
    finally:
        supervisor.close(lambda: None, 0)
    assert "has done nothing for" in caplog.text
    assert "Helper 0: It hangs here:\n" in caplog.text
    assert "in hang_here" in caplog.text


def test_what_a_helper_prints_is_caught_by_descriptor_and_by_lines():
    """Python's and C's, also of one that ends without flushing anything."""
    helper = Helper("tests.helpers.supervised", {"what": "chat"}, catch_output=True)
    try:
        wait_until(lambda: helper.exit_code() is not None)
        lines = helper.read_output()
        assert helper.exit_code() == -signal.SIGKILL
    finally:
        helper.kill()
    assert sorted(lines) == ["from C", "from Python", "from a child", "from stderr"]


def test_a_helper_that_prints_more_than_a_pipe_holds_ends_in_time(tmp_path):
    log = OutputLog(tmp_path / "envs.log", max_bytes=1 << 20)

    def start(_):
        return Helper("tests.helpers.supervised", {"what": "flood"}, catch_output=True)

    supervisor = Supervisor([Child("Helper 0", start)], TIMEOUT_S, keep_output=log.keep)
    supervisor.poll()
    supervisor.close(lambda: None, timeout_s=60)
    assert not supervisor.pids
    sizes = [path.stat().st_size for path in (log.path, log.older_path)]
    assert max(sizes) < 6 << 20  # what is read at once comes on top of the limit
    assert log.path.read_text().splitlines()[-1] == "Helper 0: the end"


def test_a_helper_that_logs_more_than_a_pipe_holds_ends_in_time(caplog):
    def start(_):
        return Helper("tests.helpers.supervised", {"what": "report"})

    supervisor = Supervisor([Child("Helper 0", start)], TIMEOUT_S)
    supervisor.poll()
    supervisor.close(lambda: None, timeout_s=60)
    assert not supervisor.pids
    assert "Helper 0: the end" in caplog.text
    assert "did not end in time" not in caplog.text


def test_a_helper_that_the_kernel_cannot_end_yet_ends_nothing_else(start, monkeypatch, caplog):
    helper = start("work")
    read_until(helper, "at work")

    def wait(timeout):
        raise subprocess.TimeoutExpired("helper", timeout)

    with monkeypatch.context() as patch:
        patch.setattr(helper._process, "wait", wait)
        helper.kill()
    assert f"Process {helper.pid} has not ended 10 s after SIGKILL." in caplog.text
    helper._process.wait()
    helper.kill = lambda: None  # for the fixture


def test_a_log_of_output_is_bounded_and_has_the_newest_lines(tmp_path):
    log = OutputLog(tmp_path / "envs.log", max_bytes=1000)
    for i in range(300):
        log.keep("Helper", [f"line {i}"])
        assert log.path.read_text().splitlines()[-1] == f"Helper: line {i}"
        assert log.path.stat().st_size < 1100
    assert log.older_path.stat().st_size < 1100
    assert f"line {299 - 40}\n" in log.older_path.read_text() + log.path.read_text()


def test_what_a_helper_has_started_ends_with_it(start):
    helper = start("spawn")
    records = read_until(helper, "child")
    pid = next(int(text.split()[1]) for _, text in records if text.startswith("child"))
    assert psutil.pid_exists(pid)
    helper.kill()
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie")
    helper.kill = lambda: None  # for the fixture


def test_ctrl_c_is_for_the_parent_alone(start):
    helper = start("work")
    read_until(helper, "at work")
    os.kill(helper.pid, signal.SIGINT)
    before = helper.heartbeat()
    wait_until(lambda: helper.heartbeat() > before)
    assert os.getpgid(helper.pid) != os.getpgid(0)


def test_a_helper_for_which_there_is_no_descriptor_leaves_none_open(monkeypatch):
    def refuse(*args, **options):
        raise OSError(errno.EMFILE, "Too many open files")

    gc.collect()
    before = psutil.Process().num_fds()
    monkeypatch.setattr(subprocess, "Popen", refuse)
    for _ in range(5):
        with pytest.raises(OSError, match="Too many"):
            Helper("tests.helpers.supervised", {"what": "work"})
    assert psutil.Process().num_fds() <= before  # fewer: what an earlier test had left is gone


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["helper", "actor"])
def test_a_process_that_is_busy_when_its_parent_dies_ends(tmp_path, kind):
    marker = tmp_path / "pid"
    command = [sys.executable, "-m", "tests.helpers.dying_parent", kind, str(marker)]
    assert subprocess.run(command, cwd=ROOT, timeout=60, check=False).returncode == -signal.SIGKILL
    pid = json.loads(marker.read_text())
    wait_until(lambda: not psutil.pid_exists(pid), 30)
