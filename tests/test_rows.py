"""The counters that make rows; what environments make of them stands in test_sync_envs.py."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from libtorchbeast.rows import (
    MAX_INT32,
    NUMBERS,
    EpisodeCounter,
    EpisodeLists,
    as_first_row,
    with_arrays,
    without_truncation,
)

K = 3
FRAME, ACTION = np.zeros((K, 2), np.float32), np.zeros(K, np.int64)
NO = [False] * K
flags = st.lists(st.booleans(), min_size=K, max_size=K)
rewards = st.lists(st.floats(-100, 100), min_size=K, max_size=K)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(rewards, flags, flags), max_size=5), st.integers(0, K - 1))
def test_lists_are_counted_as_arrays_are(steps, broken):
    arrays, lists = EpisodeCounter(K), EpisodeLists(K)
    pairs = [(arrays.first_row(FRAME), lists.first_row(FRAME))]
    for reward, done, truncated in steps:
        arrays.forget(broken)
        lists.forget(broken)
        row = arrays.row(FRAME, np.array(reward), np.array(done), np.array(truncated), ACTION)
        pairs.append((row, lists.row(FRAME, reward, done, truncated, ACTION)))
    for expected, got in pairs:
        assert list(got) == list(expected)
        for name, array in expected.items():
            assert got[name].dtype == array.dtype
            np.testing.assert_array_equal(got[name], array)


def test_rows_with_lists_are_the_same_rows():
    counters = [EpisodeLists(K), EpisodeLists(K)]
    counters[1].keeps_lists = True
    for step in range(3):
        done, truncated = [step == 1, False, True], [False, False, step == 1]
        arrays, lists = (
            counter.row(FRAME, [1.0, 2.0, step], done, truncated, [2, 0, 1]) for counter in counters
        )
        assert all(type(lists[name]) is list for name in [*NUMBERS, "last_action"])
        for change in (with_arrays, as_first_row, without_truncation):
            expected, got = change(arrays), change(lists)
            assert got.keys() == expected.keys()
            for name, array in expected.items():
                assert got[name].dtype == array.dtype
                np.testing.assert_array_equal(got[name], array)


def test_a_row_with_lists_stays_as_it_is_when_the_next_is_made():
    counter = EpisodeLists(K)
    counter.keeps_lists = True
    row = counter.row(FRAME, [1.0] * K, NO, NO, ACTION)
    counter.row(FRAME, [1.0] * K, NO, NO, ACTION)
    assert row["episode_step"] == [1] * K
    assert row["episode_return"] == [1.0] * K


def test_a_count_that_is_as_large_as_can_be_stays_so():
    counter = EpisodeLists(K)
    counter._steps[0] = MAX_INT32
    row = counter.row(FRAME, [0.0] * K, NO, NO, ACTION)
    assert row["episode_step"].tolist() == [MAX_INT32, 1, 1]
