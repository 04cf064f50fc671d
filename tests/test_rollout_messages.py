"""Rollouts and weights on the wire."""

import asyncio
import os
import threading
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from libtorchbeast.rollout_layout import ModelOffer, RolloutSpec
from libtorchbeast.rows import Spec
from libtorchbeast.rpc import env_pb2 as pb
from libtorchbeast.rpc.handshake import Refused
from libtorchbeast.rpc.rollout_messages import RolloutReader, encode_rollout
from libtorchbeast.rpc.weights import CHUNK_BYTES, Assembly, Publication
from libtorchbeast.shared_lanes import Lane
from libtorchbeast.specs import ArraySpec, discrete
from libtorchbeast.tree import leaves_of, map_tree
from torchbeast.run.remote_actor import load_weights
from torchbeast.run.remote_actor_offer import tensors_in
from torchbeast.runtime.shared_weights import SharedWeights

T, K = 3, 2
STACK = (4, 20, 20)
SPEC = Spec(
    {"camera": ArraySpec("uint8", STACK), "speed": ArraySpec("float64", (2,))},
    (discrete(5), ArraySpec("float32", (3,), -1.0, 1.0)),
)
ROLLOUT = RolloutSpec(
    SPEC,
    T,
    {
        "action": (ArraySpec("int32"), ArraySpec("float32", (3,))),  # as a model may answer
        "policy_logits": ArraySpec("float32", (11,)),
        "baseline": ArraySpec("float32"),
        "version": ArraySpec("int64"),
    },
    (ArraySpec("float32", (1, 7)), ArraySpec("int64", (2,))),
)


def make_rollout(seed, overlaps):
    """`overlaps` [T, K] says which pictures are stacks that share all but one."""
    generator = np.random.default_rng(seed)

    def draw(num_rows):
        def of(leaf):
            shape = (num_rows, K, *leaf.shape)
            low = 0 if leaf.dtype.startswith(("u", "i")) else -9
            return generator.integers(low, 5, shape).astype(leaf.dtype)

        return of

    rows = map_tree(draw(T + 1), SPEC.row)
    camera = rows["frame"]["camera"]
    for t, k in zip(*np.nonzero(overlaps), strict=True):
        camera[t + 1, k, :-1] = camera[t, k, 1:]
    rows["done"][0] = True
    rows["truncated"][:] = rows["done"] & rows["truncated"]
    output = {
        "action": map_tree(draw(T), SPEC.action),
        "policy_logits": draw(T)(ROLLOUT.output["policy_logits"]),
        "baseline": draw(T)(ArraySpec("float32")),
    }
    state = tuple(
        np.moveaxis(draw(1)(part)[0], 0, 1) for part in ROLLOUT.state
    )  # [K, L, ...] -> [L, K, ...]
    return rows, output, state


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 1000), st.lists(st.booleans(), min_size=T * K, max_size=T * K))
def test_a_rollout_comes_out_of_the_lane_as_it_went_in(seed, overlaps):
    rows, output, state = make_rollout(seed, np.reshape(overlaps, (T, K)))
    data = encode_rollout(rows, output, state, 4, {"wins": (3.0, 2)}, num_unsent=5)
    lane = Lane.create(ROLLOUT, K)
    reader = RolloutReader(ROLLOUT, K, lane.rows)
    reader.read(data, newest=4)
    parts = map_tree(lambda x: x.swapaxes(0, 1), lane.rows)
    for (name, ours), (_, theirs) in zip(leaves_of(rows), leaves_of(parts["rows"]), strict=True):
        np.testing.assert_array_equal(ours, theirs, name)
    got = parts["outputs"]
    for ours, theirs in zip(output["action"], got["action"], strict=True):
        np.testing.assert_array_equal(ours, theirs[1:])
    np.testing.assert_array_equal(output["policy_logits"], got["policy_logits"][1:])
    np.testing.assert_array_equal(output["baseline"], got["baseline"][1:])
    assert (got["version"][1:] == 4).all()
    assert not got["version"][0].any()
    for ours, theirs in zip(state, parts["state"], strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert (reader.info, reader.num_unsent) == ({"wins": (3.0, 2)}, 5)
    lane.close()


def test_pictures_that_overlap_are_sent_once():
    sizes = [
        len(encode_rollout(*make_rollout(1, np.full((T, K), overlaps)), version=0))
        for overlaps in (False, True)
    ]
    assert sizes[0] - sizes[1] == pytest.approx(T * K * 3 * 400, abs=50)


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 10**6), st.integers(0, 255), st.integers(0, 1000))
def test_bytes_that_are_changed_or_missing_are_taken_or_refused(place, byte, missing):
    data = bytearray(encode_rollout(*make_rollout(2, np.ones((T, K), bool)), version=0))
    data[place % 60] = byte  # where the fields are
    lane = Lane.create(ROLLOUT, K)
    reader = RolloutReader(ROLLOUT, K, lane.rows)
    try:
        reader.read(bytes(data[: len(data) - missing]), newest=0)
    except Refused as error:
        assert error.code == "INVALID_ARGUMENT"  # noqa: PT017
    lane.close()


# ------------------------------------------------------------------------------------------ weights


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(300, 400)
        self.register_buffer("mean", torch.randn(7))
        self.register_buffer("is_set", torch.tensor(True))


def publish(model):
    weights = SharedWeights(model)
    tensors = tensors_in(model, weights.offsets(model))
    offer = ModelOffer(ROLLOUT, {}, tensors, 2, None, weights.fd, weights.num_bytes)
    offer = ModelOffer.from_json(offer.to_json())  # as it goes to a gateway
    return weights, Publication(os.dup(weights.fd), offer)


class FakeWelcome:
    def __init__(self, tensors):
        self.tensors = tensors


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_arrive_whole_and_only_the_newest_version_is_sent(dtype):
    model, copy = Model(), Model()
    weights, publication = publish(model)
    for version in range(5):
        with torch.no_grad():
            model.linear.weight += 1e-3
        weights.publish(model, version)

    async def get():
        first = await publication.after(-1, dtype)
        assert await publication.after(0, dtype) is first, "made once for all who want it"
        waiting = asyncio.ensure_future(publication.after(4, dtype))
        await asyncio.sleep(0)
        weights.publish(model, 9)
        assert (await asyncio.wait_for(waiting, 30)).number == 9
        return first

    newest = asyncio.run(get())
    assert newest.number == 4
    pieces = list(newest.pieces())
    assert max(len(data) for _, data in pieces) <= CHUNK_BYTES
    tensors = [
        (t.name, dtype if t.is_parameter else t.dtype, t.shape) for t in publication.offer.tensors
    ]
    assembly = Assembly(len(newest.data))
    results = [
        assembly.add(
            pb.Weights(
                version=4,
                num_bytes=len(newest.data),
                offset=start,
                data=data,
                checksum=newest.checksum,
            )
        )
        for start, data in pieces
    ]
    assert results[:-1] == [None] * (len(pieces) - 1)
    assert results[-1] == (4, newest.data)
    load_weights(copy, FakeWelcome(tensors), newest.data)
    for ours, theirs in zip(model.state_dict().values(), copy.state_dict().values(), strict=True):
        is_rounded = dtype == "bfloat16" and ours.dim() > 0 and len(ours) > 7
        torch.testing.assert_close(
            ours.to(torch.bfloat16).float() if is_rounded else ours, theirs, rtol=0, atol=0
        )
    if dtype == "bfloat16":
        assert len(newest.data) < 0.51 * 4 * sum(t.numel() for t in model.state_dict().values())


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"checksum": 1}, "The checksum of version 3 of the weights is wrong"),
        ({"offset": 1}, "must be of version, size and offset"),
        ({"num_bytes": 11}, "must be of version, size and offset"),
        ({"version": -1}, "must be of version, size and offset"),
        ({"data": b""}, "and not empty"),
        ({"data": bytes(11)}, "Weights must have 10 bytes, got more"),
    ],
)
def test_pieces_of_weights_that_break_a_rule_are_refused(changes, sentence):
    data = bytes(range(10))
    right = {"version": 3, "num_bytes": 10, "offset": 0, "data": data, "checksum": zlib.crc32(data)}
    assert Assembly(10).add(pb.Weights(**right)) == (3, data)
    with pytest.raises(Refused, match=sentence):
        Assembly(10).add(pb.Weights(**{**right, **changes}))


def test_no_version_is_a_mixture_while_the_learner_writes_all_the_time():
    model = torch.nn.Linear(500, 500)
    weights, publication = publish(model)
    stop = False

    def write():
        version = 0
        while not stop:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(version)
            weights.publish(model, version)
            version += 1

    writer = threading.Thread(target=write)
    writer.start()

    async def read():
        have = -1
        for _ in range(20):
            version = await publication.after(have, "float32")
            numbers = np.frombuffer(version.data, np.float32)
            assert (numbers == version.number).all()
            have = version.number

    try:
        asyncio.run(asyncio.wait_for(read(), 60))
    finally:
        stop = True
        writer.join(30)
