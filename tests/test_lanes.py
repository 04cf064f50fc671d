"""Lanes: the memory that environments and actor share."""

import errno
import itertools
import math
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from libtorchbeast import _C, shared_lanes
from libtorchbeast.rows import Spec, Unstacked
from libtorchbeast.shared_lanes import (
    AGENT,
    CLOSED,
    ENVIRONMENT,
    FREE,
    GONE,
    Lane,
    LaneClosed,
    lane_size,
    map_lane,
)
from libtorchbeast.shared_memory import ALIGNMENT, anonymous_memory
from libtorchbeast.specs import ArraySpec, discrete

SPEC = Spec(
    {"image": ArraySpec("uint8", (3, 5)), "parts": (ArraySpec("float64"), ArraySpec("bool", (7,)))},
    {"move": ArraySpec("int64"), "force": ArraySpec("float32", (2,))},
)
K = 3


@pytest.fixture
def lane():
    lane = Lane.create(SPEC, K)
    yield lane
    lane.close()


def leaves_of(nest):
    if isinstance(nest, dict):
        return [leaf for key in sorted(nest) for leaf in leaves_of(nest[key])]
    if isinstance(nest, tuple):
        return [leaf for part in nest for leaf in leaves_of(part)]
    return [nest]


def test_a_lane_that_cannot_be_mapped_leaves_no_descriptor_open(monkeypatch):
    def refuse(*args):
        raise OSError(errno.EMFILE, "Too many open files")

    descriptors = []

    def make_memory(*args):
        descriptors.append(anonymous_memory(*args))
        return descriptors[-1]

    monkeypatch.setattr(shared_lanes, "anonymous_memory", make_memory)
    monkeypatch.setattr(shared_lanes.mmap, "mmap", refuse)
    with pytest.raises(OSError, match="Too many"):
        Lane.create(SPEC, K)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptors[0])


def test_views_are_aligned_apart_and_of_the_right_kind(lane):
    views = leaves_of((lane.rows, lane.actions))
    specs = leaves_of((SPEC.row, SPEC.action))
    spans = []
    for view, spec in zip(views, specs, strict=True):
        assert view.dtype == spec.dtype
        assert view.shape == (K, *spec.shape)
        address = view.__array_interface__["data"][0]
        assert address % ALIGNMENT == 0
        spans.append((address, address + view.nbytes))
    spans.sort()
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def a_row():
    return {name: np.zeros_like(view) for name, view in flat_rows(Lane.create(FLAT, K)).items()}


def flat_rows(lane):
    return {name: view.copy() for name, view in lane.rows.items()}


FLAT = Spec(ArraySpec("float32", (2,)), discrete(2**41))


def test_numbers_are_written_from_lists_as_from_arrays():
    one, other = Lane.create(FLAT, K), Lane.create(FLAT, K)
    numbers = {
        "reward": [0.5, -1.0, 2.0],
        "done": [True, False, True],
        "truncated": [False, False, True],
        "episode_step": [1, 2, 3],
        "episode_return": [1.5, 2.5, 1e20],
        "last_action": [3, 0, 2**40],
    }
    one.write({**a_row(), **numbers})
    other.write({**a_row(), **{name: np.array(values) for name, values in numbers.items()}})
    for name, expected in flat_rows(other).items():
        np.testing.assert_array_equal(one.rows[name], expected)
    assert one.rows["episode_step"].tolist() == [1, 2, 3]


def test_actions_are_copies_and_lists_only_where_each_is_one_integer(lane):
    flat = Lane.create(FLAT, K)
    flat.actions[:] = [1, 2, 3]
    lists, arrays = flat.read_actions(as_list=True), flat.read_actions(as_list=False)
    flat.actions[:] = 0
    assert lists == arrays.tolist() == [1, 2, 3]
    assert isinstance(lane.read_actions(as_list=True)["move"], np.ndarray)
    unknown = Lane.create(Spec(ArraySpec("float32", (2,))), K)  # nobody said how many there are
    assert isinstance(unknown.read_actions(as_list=True), np.ndarray)


@pytest.mark.parametrize("numbers", [[1.0], [1.0] * (K + 1), np.ones(1), np.ones((K, 1))])
def test_a_row_of_another_number_of_environments_is_refused(numbers):
    with pytest.raises(ValueError, match="A row must hold"):
        Lane.create(FLAT, K).write({**a_row(), "reward": numbers})


def test_a_row_that_would_lose_its_fractions_is_refused():
    with pytest.raises(TypeError, match="A row must hold int32, got float64"):
        Lane.create(FLAT, K).write({**a_row(), "episode_step": np.full(K, 0.5)})


def test_rows_are_sent_and_waited_for_in_one_call():
    lane = Lane.create(FLAT, K)
    lane.attach(1)
    assert not lane.send_rows(timeout_s=0.01)
    assert lane.turn.pass_on(AGENT, ENVIRONMENT)
    agent = threading.Thread(
        target=lambda: (
            lane.turn.wait_while(ENVIRONMENT, 10),
            lane.turn.pass_on(AGENT, ENVIRONMENT),
        )
    )
    agent.start()
    assert lane.send_rows(timeout_s=10)
    agent.join(10)
    lane.turn.abandon()
    with pytest.raises(LaneClosed):
        lane.send_rows(timeout_s=10)


def test_both_ends_see_the_same_memory(lane):
    other = Lane(os.dup(lane.fd), SPEC, K)
    lane.rows["frame"]["image"][...] = 7
    lane.actions["move"][...] = [1, 2, 3]
    assert (other.rows["frame"]["image"] == 7).all()
    assert other.actions["move"].tolist() == [1, 2, 3]
    lane.attach(1)
    lane.send_rows()
    assert other.turn.state == AGENT
    assert other.num_passes == 1
    other.release()


def test_a_row_is_written_field_by_field(lane):
    row = {name: np.zeros(K, bool) for name in SPEC.row}
    row["frame"] = {
        "parts": (np.arange(K) / 2, np.ones((K, 7), bool)),
        "image": np.arange(K * 15).reshape(K, 3, 5).astype(np.uint8),
    }
    row["last_action"] = {"move": np.arange(K), "force": np.ones((K, 2))}
    row["reward"] = np.array([1.5, -2, 0])
    lane.write(row)
    assert lane.rows["frame"]["image"][2, 2, 4] == 44
    assert lane.rows["frame"]["parts"][0].tolist() == [0, 0.5, 1]
    assert lane.rows["reward"].tolist() == [1.5, -2, 0]
    assert lane.rows["last_action"]["move"].tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match=r"must hold float32\(3,\), got shape \(\)"):
        lane.write({**row, "reward": np.float64(1.0)})


def test_the_turn_goes_round(lane):
    lane.attach(1)
    lane.send_rows()
    assert not lane.wait_for_actions(0.01)  # the agent takes its time
    assert lane.turn.pass_on(AGENT, ENVIRONMENT)
    assert lane.wait_for_actions(1)
    lane.send_rows()
    assert lane.turn.state == AGENT


def test_waiting_ends_when_the_lane_is_closed(lane):
    lane.attach(1)
    lane.send_rows()
    threading.Timer(0.05, lane.turn.close).start()
    start = time.monotonic()
    with pytest.raises(LaneClosed):
        lane.wait_for_actions(30)
    assert time.monotonic() - start < 10
    with pytest.raises(LaneClosed):
        lane.attach(1)
    with pytest.raises(LaneClosed):
        lane.send_rows()


def test_an_abandoned_lane_is_free_when_its_rollout_was_taken(lane):
    lane.attach(1)
    lane.send_rows()
    lane.turn.abandon()
    assert lane.turn.state == GONE
    with pytest.raises(TimeoutError):
        lane.attach(0.01)
    with pytest.raises(LaneClosed):
        lane.send_rows()  # who was declared gone has no turn any more
    assert lane.turn.pass_on(GONE, FREE)
    with pytest.raises(LaneClosed):
        lane.send_rows()  # nor when the lane is free for others
    lane.attach(1)
    lane.send_rows()
    with pytest.raises(RuntimeError, match="in use"):
        Lane(os.dup(lane.fd), SPEC, K).attach(0.01)


@pytest.mark.parametrize("portable", [True, False])
def test_the_memory_has_no_name_and_so_goes_with_the_last_process(portable):
    fd = anonymous_memory(lane_size(SPEC, K), "test", portable)
    assert os.fstat(fd).st_size == lane_size(SPEC, K)
    assert os.fstat(fd).st_nlink == 0
    lane = Lane(fd, SPEC, K)
    lane.rows["reward"][...] = 5
    lane.close()
    assert lane.turn.state == CLOSED


def test_who_is_handed_a_lane_cannot_shrink_it(lane):
    """Else the learner would be killed by SIGBUS where it reads."""
    size = os.fstat(lane.fd).st_size
    with pytest.raises(PermissionError):
        os.ftruncate(lane.fd, size - 1)
    with pytest.raises(PermissionError):
        os.ftruncate(lane.fd, size + 1)


@pytest.mark.parametrize("kind", ["lane", "unsealed", "file", "small"])
def test_only_memory_that_cannot_shrink_is_taken_for_a_lane(kind, lane, tmp_path):
    """Else a learner could end a host with SIGBUS, by making it smaller later."""
    size = os.fstat(lane.fd).st_size
    if kind == "lane":
        fd = os.dup(lane.fd)
    elif kind == "unsealed":
        fd = os.memfd_create("lane", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, size)
    elif kind == "small":
        fd = anonymous_memory(size - 1, "lane")
    else:
        fd = os.open(tmp_path / "lane", os.O_RDWR | os.O_CREAT)
        os.ftruncate(fd, size)
    mapped = map_lane(fd, lane.spec, lane.num_envs)
    assert (mapped is not None) == (kind == "lane")
    if mapped is not None:
        mapped.release()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)  # closed, whatever it was


def test_specs_survive_json():
    assert Spec.from_json(SPEC.to_json()) == SPEC
    listed = Spec([ArraySpec("uint8", (2,)), ()], ArraySpec("int64"))
    assert Spec.from_json(listed.to_json()) == listed


def test_a_turn_needs_a_word_of_its_own():
    with pytest.raises(TypeError, match="one uint32"):
        _C.Turn(np.zeros(2, np.uint32))


def test_many_lanes_may_have_many_descriptors():
    program = (
        "import resource\n"
        "from libtorchbeast.shared_lanes import allow_descriptors\n"
        "_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))\n"
        "allow_descriptors(100)\n"
        "print(min(1124, hard), *resource.getrlimit(resource.RLIMIT_NOFILE), hard)\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    wanted, soft, hard, hard_before = (int(word) for word in run.stdout.split())
    assert soft >= wanted
    assert hard == hard_before


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8", "bool", "int64"])
@pytest.mark.parametrize("shape", [(2, 3), (1,), (), (0,)])
def test_frames_left_apart_are_written_as_they_are(shape, dtype):
    """Also those that lie otherwise in memory, or have another dtype that fits."""
    lane = Lane.create(Spec(ArraySpec(dtype, shape)), K)
    numbers = np.arange(math.prod(shape)).reshape(shape) + 1
    frames = [np.asarray(numbers.astype(dtype) + np.array(i, dtype)) for i in range(K)]
    others = [frames[0], np.asfortranarray(frames[1]), frames[2].astype(">i8").astype(dtype)]
    for arrays in (frames, others):
        lane.rows["frame"][:] = 0
        lane.write({**a_row(), "frame": Unstacked(arrays)})
        np.testing.assert_array_equal(lane.rows["frame"], np.stack(frames))


def test_frames_left_apart_of_another_shape_or_dtype_are_refused():
    lane = Lane.create(FLAT, 2)
    good, rows = np.zeros(2, np.float32), {k: v[:2] for k, v in a_row().items()}
    with pytest.raises(ValueError, match="A row must hold"):
        lane.write({**rows, "frame": Unstacked([np.zeros(3, np.float32)] * 2)})
    with pytest.raises(TypeError, match="A row must hold float32, got complex64"):
        lane.write({**rows, "frame": Unstacked([good.astype(np.complex64)] * 2)})
    lane.write({**rows, "frame": Unstacked([good, np.array([1, 2])])})
    assert lane.rows["frame"].tolist() == [[0, 0], [1, 2]]
