"""nest: one test for each promise, and properties that hold for nests of any shape."""

import collections
import contextlib
import gc
import sys
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

import nest


class Point(NamedTuple):
    x: Any
    y: Any


class Labelled(Point):
    """A namedtuple with a mind of its own: cannot be made from its fields."""

    def __new__(cls, label: str) -> "Labelled":
        return super().__new__(cls, label, label)

    def both(self) -> tuple[Any, Any]:
        return self.x, self.y


LEAVES = st.one_of(st.none(), st.integers(), st.text(max_size=3), st.sets(st.integers()))
NESTS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.builds(Point, inner, inner),
    ),
    max_leaves=12,
)


def same_containers(a: Any, b: Any) -> bool:
    """Whether the containers are of the same types and sizes, leaves aside."""
    if isinstance(a, dict):
        keys_match = type(a) is type(b) and list(a) == list(b)
        return keys_match and all(same_containers(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        sizes_match = type(a) is type(b) and len(a) == len(b)
        return sizes_match and all(same_containers(*pair) for pair in zip(a, b, strict=True))
    return not isinstance(b, (list, tuple, dict))


def slow_flatten(n: Any) -> list[Any]:
    if isinstance(n, dict):
        return [leaf for key in sorted(n) for leaf in slow_flatten(n[key])]
    if isinstance(n, (list, tuple)):
        return [leaf for item in n for leaf in slow_flatten(item)]
    return [n]


@given(NESTS)
def test_flatten_lists_the_leaves_in_order(n):
    assert nest.flatten(n) == slow_flatten(n)


@given(NESTS)
def test_map_keeps_containers_and_order(n):
    mapped = nest.map(repr, n)
    assert same_containers(n, mapped)
    assert nest.flatten(mapped) == [repr(leaf) for leaf in slow_flatten(n)]


@given(NESTS)
def test_pack_as_undoes_flatten(n):
    packed = nest.pack_as(n, nest.flatten(n))
    assert packed == n
    assert same_containers(n, packed)


@given(NESTS)
def test_map_many_gets_lists_of_corresponding_leaves(n):
    seen = []
    result = nest.map_many(lambda leaves: seen.append(leaves) or len(leaves), n, n, n)
    assert seen == [[leaf] * 3 for leaf in slow_flatten(n)]
    assert same_containers(n, result)


@given(NESTS)
def test_map_many2_is_map_many_of_two(n):
    assert nest.map_many2(lambda a, b: a is b, n, n) == nest.map(lambda _: True, n)


@given(NESTS)
def test_front_is_the_first_leaf(n):
    leaves = slow_flatten(n)
    if leaves:
        assert nest.front(n) is leaves[0]
    else:
        with pytest.raises(ValueError, match="empty"):
            nest.front(n)


def test_kinds_of_containers_are_kept():
    n = {"list": [1], "tuple": (1,), "point": Point(1, [2]), "dict": {"a": 1}}
    mapped = nest.map(lambda x: x + 1, n)
    assert mapped == {"list": [2], "tuple": (2,), "point": Point(2, [3]), "dict": {"a": 2}}
    assert type(mapped["point"]) is Point


def test_a_namedtuple_with_its_own_constructor_is_kept():
    mapped = nest.map(str.upper, Labelled("a"))
    assert type(mapped) is Labelled
    assert mapped.both() == ("A", "A")


def test_dicts_are_walked_in_sorted_order_and_keep_their_own():
    n = {"b": 1, "a": 2, "c": 0}
    seen = []
    mapped = nest.map(lambda x: seen.append(x) or x, n)
    assert seen == [2, 1, 0]
    assert nest.flatten(n) == [2, 1, 0]
    assert nest.front(n) == 2
    assert list(mapped) == ["b", "a", "c"]


def test_subclasses_of_containers_are_containers():
    n = collections.OrderedDict(b=1, a=collections.defaultdict(list, c=2))
    assert nest.flatten(n) == [2, 1]
    assert nest.map(lambda x: -x, n) == {"b": -1, "a": {"c": -2}}


@pytest.mark.parametrize("leaf", [None, 1, "text", {1}, object(), range(3)])
def test_anything_else_is_a_leaf(leaf):
    assert nest.flatten(leaf) == [leaf]
    assert nest.flatten((leaf, [leaf])) == [leaf, leaf]
    assert nest.map(lambda x: x, leaf) is leaf


def test_empty_containers_have_no_leaves():
    assert nest.flatten(((), [], {})) == []
    assert nest.map(lambda x: 1 / 0, ((), [], {})) == ((), [], {})


def test_lists_and_tuples_correspond_and_the_first_decides():
    assert nest.map_many2(lambda a, b: a + b, [1, (2,)], (3, [4])) == [4, (6,)]


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ([1, 2], [1], "got 2 vs 1"),
        ((1, 2), (1,), "got 2 vs 1"),
        ({"a": 1}, {"b": 1}, "same keys"),
        ({"a": 1}, {}, "1 vs 0"),
        ([1], {"a": 1}, "nests don't match"),
        ({"a": 1}, [1], "nests don't match"),
        ([1], 1, "nests don't match"),
        (1, [1], "nests don't match"),
        ([[1]], [1], "nests don't match"),
    ],
)
def test_nests_that_differ_are_an_error(a, b, message):
    with pytest.raises(ValueError, match=message):
        nest.map_many2(lambda x, y: x, a, b)
    with pytest.raises(nest.NestError, match=message):
        nest.map_many(lambda leaves: leaves, a, b)


def test_pack_as_with_too_many_or_too_few():
    with pytest.raises(ValueError, match="didn't exhaust sequence"):
        nest.pack_as([0, (0,)], [1, 2, 3])
    with pytest.raises(ValueError, match="Too few elements"):
        nest.pack_as([0, (0,)], [1])
    assert nest.pack_as([0, (0,)], iter([1, 2])) == [1, (2,)]


def test_map_many_needs_a_nest():
    with pytest.raises(ValueError, match="at least one nest"):
        nest.map_many(lambda leaves: leaves)


def test_exceptions_of_the_function_come_through():
    with pytest.raises(ZeroDivisionError):
        nest.map(lambda x: 1 / x, {"a": [1, 0]})


def test_a_nest_that_contains_itself_is_an_error():
    n: list[Any] = []
    n.append(n)
    for function in (nest.flatten, nest.front, lambda n: nest.map(lambda x: x, n)):
        with pytest.raises(RecursionError):
            function(n)


def test_a_function_may_change_the_containers():
    n = [1, 2, 3]
    with pytest.raises(ValueError, match="shorter"):
        nest.map(lambda x: n.clear(), n)
    d = {"a": object(), "b": object()}
    with pytest.raises(ValueError, match="same keys"):
        nest.map(lambda x: d.clear(), d)


@pytest.mark.slow
def test_no_reference_is_leaked_over_a_million_operations():
    leaf, function = object(), lambda *_: leaf
    n = {"a": [leaf, (leaf,)], "b": Point(leaf, {"c": leaf})}

    def operate(times: int) -> None:
        for _ in range(times):
            nest.map(function, n)
            nest.map_many(function, n, n)
            nest.map_many2(function, n, n)
            nest.pack_as(n, nest.flatten(n))
            nest.front(n)
            for bad in ([leaf], {"a": leaf, "c": leaf}):
                with contextlib.suppress(ValueError):
                    nest.map_many2(function, n, bad)
            with contextlib.suppress(ValueError):
                nest.pack_as(n, [leaf])

    def count() -> tuple[int, ...]:
        gc.collect()
        return tuple(sys.getrefcount(x) for x in (leaf, function, n, Point, nest.NestError))

    operate(10)
    references, blocks = count(), sys.getallocatedblocks()
    operate(110_000)  # Nine operations each.
    assert count() == references
    assert sys.getallocatedblocks() - blocks < 1000
