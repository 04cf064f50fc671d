"""Where several learners meet: who is waited for, what all of them hear, and who they are."""

import dataclasses
import signal
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from libtorchbeast.rows import Spec
from libtorchbeast.rpc.address import listening_address
from tests.helpers.ranks import variables
from tests.helpers.specs import spec_for
from torchbeast import monobeast, polybeast_learner
from torchbeast.core import rank_rounds as rounds_module
from torchbeast.core.file_writer import new_xpid
from torchbeast.core.rank_rounds import Decision, Rounds
from torchbeast.core.rank_stats import SharedStats, merge_figures
from torchbeast.core.ranks import ALONE, Place
from torchbeast.errors import UsageError
from torchbeast.run.env_sources import RemoteEnvironments
from torchbeast.run.flags import TrainingFlags, num_cores, with_recipe, with_values
from torchbeast.run.rank_flags import for_rank
from torchbeast.run.signals import StopRequest
from torchbeast.runtime.distributed import agree_on_name

SECOND_OF_TWO = Place(rank=1, size=2, local_rank=1, local_size=2)


class Scripted:
    """Rank 0 of two; what rank 1 says at a meeting is given by the test."""

    rank, size = 0, 2

    def __init__(self):
        self.other = [0.0] * 5

    def gather(self, tensor):
        return torch.stack([tensor, torch.tensor(self.other, dtype=tensor.dtype)])

    def exchange(self, message):
        return [message, message]


@pytest.fixture
def clock(monkeypatch):
    time = SimpleNamespace(now=100.0)
    monkeypatch.setattr(rounds_module.time, "monotonic", lambda: time.now)
    return time


def meeting(clock):
    ranks = Scripted()
    rounds = Rounds(ranks)

    def meet(has_batch, other_has, after_s=0.0):
        clock.now += after_s
        ranks.other = [float(other_has), 0.0, 0.0, 0.0, 0.0]
        return rounds.meet(has_batch)

    return ranks, rounds, meet


def test_a_rank_is_waited_for_a_second_and_then_no_more_until_it_has_a_batch(clock, caplog):
    _, _, meet = meeting(clock)
    assert meet(False, False) is Decision.WAIT
    assert meet(True, True) is Decision.GO
    assert meet(True, False, after_s=0.1) is Decision.WAIT
    assert meet(True, False, after_s=0.9) is Decision.WAIT
    assert meet(True, False, after_s=0.2) is Decision.GO
    assert "No rollouts from learner 1 for 1.1 s; the others go on" in caplog.text
    assert meet(True, False, after_s=0.1) is Decision.GO  # at once
    assert meet(True, True, after_s=0.1) is Decision.GO
    assert meet(True, False, after_s=0.1) is Decision.WAIT


def test_a_rank_is_waited_for_as_long_as_the_fastest_took(clock):
    _, _, meet = meeting(clock)
    assert meet(True, True) is Decision.GO
    assert meet(True, False, after_s=30.0) is Decision.WAIT
    assert meet(True, False, after_s=29.0) is Decision.WAIT
    assert meet(True, False, after_s=2.0) is Decision.GO


def test_a_rank_without_a_batch_learns_from_those_of_the_others(clock):
    _, rounds, meet = meeting(clock)
    assert meet(False, True) is Decision.WAIT
    rounds._awaited = {1}
    assert meet(False, True) is Decision.GO


def test_all_stop_if_one_is_asked_to(clock):
    ranks, rounds, _ = meeting(clock)
    rounds.stop = SimpleNamespace(signal=None)
    ranks.other[3] = 15.0
    assert rounds.meet(True) is Decision.STOP
    assert rounds.stop.signal == 15


def test_clients_of_any_rank_are_known_to_all(clock):
    ranks, rounds, _ = meeting(clock)
    ranks.other[4] = 1.0
    rounds.meet(False)
    assert rounds.any_clients


def test_one_learner_never_waits():
    rounds = Rounds(ALONE)
    rounds.stop = SimpleNamespace(signal=15)  # which the main loop serves
    assert rounds.meet(True) is Decision.GO
    assert rounds.stops_alone


# --- A new name for each start -------------------------------------------------------------------


class Store:
    """As torchrun's, which outlives the learners."""

    def __init__(self):
        self.values = {}

    def set(self, key, value):
        self.values[key] = value.encode()

    def get(self, key):
        return self.values[key]

    def check(self, keys):
        return all(key in self.values for key in keys)


def test_learners_agree_on_a_name_whatever_the_last_ones_have_left():
    store, names = Store(), set()
    stop = SimpleNamespace(signal=None)
    for size in (2, 3, 3):
        places = [Place(rank, size, rank, size) for rank in range(size)]
        with ThreadPoolExecutor(size) as threads:
            found = set(threads.map(lambda place: agree_on_name(store, place, stop), places))
        assert len(found) == 1
        names |= found
    assert len(names) == 3


def test_who_waits_for_others_hears_a_signal():
    stop = SimpleNamespace(signal=15, exit_code=0)
    with pytest.raises(SystemExit):
        agree_on_name(Store(), SECOND_OF_TWO, stop)


# --- Who one is ----------------------------------------------------------------------------------


def set_place(monkeypatch, rank, size):
    for name, value in variables(rank, size, port=1).items():
        monkeypatch.setenv(name, value)


def test_without_torchrun_a_learner_is_alone(monkeypatch):
    assert Place.find({}) == Place()
    assert Place.find({"RANK": "1", "WORLD_SIZE": "2"}) == Place()  # of something else
    assert Place.find(variables(1, 2, port=1)) == SECOND_OF_TWO


def test_learners_of_a_machine_share_its_cores(monkeypatch):
    cores = num_cores()
    set_place(monkeypatch, 1, 2)
    assert num_cores() == max(1, cores // 2)


def test_each_learner_dials_and_listens_elsewhere(monkeypatch):
    flags = polybeast_learner.Flags(
        env="Catch", server_addresses="a:1,b:1,c:1,unix:/x,unix:/y", listen="h:4242,unix:/z,h:0"
    )
    assert len(flags.dial) == 5
    set_place(monkeypatch, 1, 2)
    assert flags.dial == ["unix:/y", "b:1"]
    assert flags.listen_at == ["h:4243", "unix:/z.1", "h:0"]
    here = Place(rank=3, size=4, local_rank=1, local_size=2)  # of the second machine
    assert here.share_of("abcde") == ["d"]
    assert here.share_of("abcde", on_this_machine=True) == ["b", "d"]
    assert listening_address("h:4242", 0) == "h:4242"  # whatever its rank


def test_learners_play_nothing(monkeypatch):
    set_place(monkeypatch, 1, 2)
    with pytest.raises(UsageError, match=r"--mode test is for one process, got 2 .*torchrun"):
        monobeast.Flags(env="Catch", mode="test", xpid="run").validate()


def test_a_run_has_one_name_for_all_learners_and_restarts(monkeypatch):
    assert new_xpid().startswith("torchbeast-2")  # the time
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "my/job")
    assert new_xpid() == "torchbeast-my-job"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert new_xpid() == new_xpid()
    assert "none" not in new_xpid()


def two_that_share():
    """The first two ranks; what the first one shares, the second one gets."""
    shared = {}

    class First(Scripted):
        def share(self, contents):
            shared.update(contents)
            return contents

    class Second(Scripted):
        rank = 1

        def share(self, contents):
            return dict(shared)

    return First(), Second()


def test_flags_of_the_run_are_those_of_the_first_learner(caplog, tmp_path):
    first = TrainingFlags(env="Catch", savedir=tmp_path, xpid="run", batch_size=5)
    ranks = two_that_share()
    assert for_rank(first, ranks[0]) == first
    second = for_rank(TrainingFlags(env="Catch", savedir=tmp_path, xpid="other"), ranks[1])
    assert (second.batch_size, second.rundir) == (5, tmp_path / "run" / "rank-1")
    assert second.disable_checkpoint
    assert second.seed != first.seed
    said = "All learners use the flags of learner 0, which differ here: batch_size 5, xpid run"
    assert said in caplog.text


def test_a_recipe_that_comes_later_changes_the_same_for_all_learners(tmp_path):
    """What rank 0 was given stays on all ranks, once the first environments choose a recipe."""
    flags = TrainingFlags(env="remote", savedir=tmp_path, xpid="run")
    given = with_values(flags, "command line", {"learning_rate": 0.001, "num_passes": 2})
    ranks = two_that_share()
    spec = spec_for((7,), 3)
    both = [with_recipe(for_rank(f, r), spec) for f, r in zip((given, flags), ranks, strict=True)]
    assert [(f.learning_rate, f.num_passes, f.num_minibatches) for f in both] == [
        (0.001, 2, 16)
    ] * 2


@pytest.mark.parametrize(
    ("has_first", "has_second", "is_refused"),
    [(False, True, True), (False, False, False), (True, True, False), (True, False, False)],
)
def test_a_checkpoint_that_only_another_machine_has_is_not_passed_over(
    tmp_path, has_first, has_second, is_refused
):
    flags = TrainingFlags(env="Catch", savedir=tmp_path, xpid="run")

    class Apart(Scripted):
        def share(self, contents):
            return contents

        def exchange(self, message):
            assert message["has_one"] == has_first
            return [message, {"has_one": has_second, "host": "second", "folder": "/there"}]

    if has_first:
        flags.rundir.mkdir()
        (flags.rundir / "model.tar").touch()
    if not is_refused:
        assert for_rank(flags, Apart()) == flags
        return
    with pytest.raises(UsageError, match="but learner 1 on second has one in /there; let that"):
        for_rank(flags, Apart())
    anew = dataclasses.replace(flags, disable_checkpoint=True)
    assert for_rank(anew, Apart()) == anew


def test_the_first_environments_of_any_learner_decide_for_all(monkeypatch):
    board = Board()
    spec = spec_for((7,), 3)
    served = SimpleNamespace(spec=None, decide=lambda spec: setattr(served, "spec", spec))
    served.wait_for_spec = lambda timeout_s: spec
    other = SimpleNamespace(spec=None, decide=lambda spec: setattr(other, "spec", spec))
    stop = SimpleNamespace(signal=None)
    for gateways in (served, other):  # the other one has no environments
        source = RemoteEnvironments.__new__(RemoteEnvironments)
        source._gateways = gateways
        found = source._wait_for_spec(stop, board)
        assert found.to_json() == spec.to_json()
        assert isinstance(found, Spec)


def test_a_signal_to_one_learner_ends_the_wait_of_all():
    def come_in_vain(timeout_s):
        raise TimeoutError

    board = Board()
    for asked in (signal.SIGINT, None):  # the second has heard of nothing
        source = RemoteEnvironments.__new__(RemoteEnvironments)
        source._gateways = SimpleNamespace(spec=None, wait_for_spec=come_in_vain)
        stop = StopRequest()
        stop.signal = asked
        with pytest.raises(SystemExit) as ended:
            source._wait_for_spec(stop, board)
        assert ended.value.code == 130


class Board(Scripted):
    """On which learners write for each other."""

    def __init__(self):
        super().__init__()
        self.written = {}

    def look_up(self, name):
        return self.written.get(name)

    def write(self, name, text):
        self.written.setdefault(name, text)


# --- Statistics ----------------------------------------------------------------------------------


def test_what_one_rank_adds_counts_once_all_have_heard_it():
    first, second = SharedStats(), SharedStats()
    first.add_episodes([1.0], [5])
    first.count("dropped_rollouts", 2)
    first.observe({"num_actors": 4.0, "learner_idle": 0.5})
    second.add_episodes([3.0, 5.0], [5, 6])
    second.add_info({"score": (4.0, 2)})
    second.observe({"num_actors": 2.0, "learner_idle": 0.0})
    assert first.summary()["episodes"] == 0
    news = [first.take_news(), second.take_news()]
    for stats in (first, second):
        stats.add_news(news)
    summary = first.summary()
    assert summary == second.summary()
    assert summary["mean_episode_return"] == 3.0
    assert (summary["episodes"], summary["dropped_rollouts"]) == (3, 2)
    assert (summary["num_actors"], summary["learner_idle"]) == (6.0, 0.25)
    assert summary["info/score"] == 2.0
    assert first.take_news() == SharedStats().take_news()  # nothing counts twice


def test_sizes_are_those_of_all_ranks_though_not_all_report_at_every_update():
    stats = SharedStats()
    quiet, speaking = SharedStats(), SharedStats()
    for first in (True, False, True, False):
        speaking.observe({"num_actors": 4.0})
        news = [speaking.take_news(), quiet.take_news()]
        stats.add_news(news if first else news[::-1])
        seen = stats.summary()["num_actors"]
    assert seen == 8.0


def test_losses_add_up_and_means_are_weighted():
    figures = [{"total_loss": 3.0, "policy_lag": 1.0}, {}, {"total_loss": 2.0, "policy_lag": 4.0}]
    assert merge_figures(figures, [10, 0, 20]) == {"total_loss": 5.0, "policy_lag": 3.0}
