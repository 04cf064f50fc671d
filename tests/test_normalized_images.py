"""Pixels at a running mean of 0 and deviation of 1: against a slow formula, and what it is for."""

import copy

import numpy as np
import pytest
import torch

from libtorchbeast.rows import Spec
from libtorchbeast.specs import ArraySpec, discrete
from tests.helpers.specs import spec_for
from torchbeast.errors import UsageError
from torchbeast.models import agent as agents
from torchbeast.models import make_model
from torchbeast.models.frames import MAX_PIXEL, MIN_PIXEL_DEVIATION, Images
from torchbeast.run.flags import TrainingFlags
from torchbeast.runtime.inference_model import ActorModel, tensors_of

GREY = ArraySpec("uint8", (4, 84, 84), 0, 255)
EVERYWHERE = torch.ones(1, 64, dtype=torch.bool)


def games(number, seed=0):
    """Walls that never change, and a ball of two pixels that is somewhere else in each frame."""
    generator = np.random.default_rng(seed)
    frames = np.full((number, 4, 84, 84), 20, np.uint8)
    frames[:, :, :12] = frames[:, :, :, :6] = 142
    for frame in frames:
        y, x = generator.integers(20, 80, 2)
        frame[:, y, x : x + 2] = 100
    return torch.from_numpy(frames)


def slow_normal(frames, seen):
    """One pixel after the other, as the definition has it; `frames` and `seen` as 0 to 1."""
    normal = np.zeros_like(frames)
    for place in np.ndindex(*frames.shape[1:]):
        column = seen[(slice(None), *place)]
        deviation = np.sqrt(column.var() + MIN_PIXEL_DEVIATION**2)
        normal[(slice(None), *place)] = (frames[(slice(None), *place)] - column.mean()) / deviation
    return normal.clip(-MAX_PIXEL, MAX_PIXEL)


@pytest.mark.parametrize(
    ("spec", "size"),
    [
        (ArraySpec("uint8", (4, 32, 32), 0, 255), 255),
        (ArraySpec("uint8", (4, 32, 32)), 255),
        (ArraySpec("float32", (4, 32, 32), 0.0, 50.0), 50),
        (ArraySpec("float32", (4, 32, 32)), 1),
    ],
    ids=str,
)
def test_pixels_are_normalised_as_the_slow_formula_has_it(spec, size):
    generator = np.random.default_rng(1)
    dtype = np.dtype(spec.dtype)
    parts = [(generator.random((n, 4, 32, 32)) ** 4 * size).astype(dtype) for n in (9, 30, 4)]
    images = Images(spec, normalize=True)
    for part in parts[:2]:
        images.observe(torch.from_numpy(part))
    seen = np.concatenate(parts[:2]).astype(np.float64) / size
    expected = slow_normal(parts[2].astype(np.float64) / size, seen)
    got = images(torch.from_numpy(parts[2]))
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-4, atol=1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = images(torch.from_numpy(parts[2]))
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), got, rtol=1e-2, atol=1e-2)


def test_a_ball_stands_out_and_walls_are_gone():
    images = Images(GREY, normalize=True)
    images.observe(games(500))
    frame = games(1, seed=1)
    seen = images(frame)[0]
    is_ball = frame[0] == 100
    assert seen[is_ball].min() > 3
    assert seen[~is_ball].abs().max() < 0.5


def test_a_new_net_sees_what_moves_and_no_unit_is_dead():
    """Before, a quarter of the units was 0 for every frame, and the rest hardly changed."""
    varying, dead = {}, {}
    for normalize in (False, True):
        torch.manual_seed(0)
        model = make_model("shallow", spec_for((4, 84, 84), 3), False, normalize_images=normalize)
        model.observe_frames(games(65).unsqueeze(0).expand(2, -1, -1, -1, -1), EVERYWHERE[:, :65])
        with torch.no_grad():
            features = model.encoder(games(200, seed=1))
        varying[normalize] = (features.std(0).norm() / features.mean(0).norm()).item()
        dead[normalize] = (features.amax(0) == 0).float().mean().item()
    assert varying[True] > 5 * varying[False]
    assert dead[True] == 0 < dead[False]


def test_only_rows_that_happened_are_taken_in(monkeypatch):
    monkeypatch.setattr(agents, "MAX_OBSERVED", 1000)
    model = make_model("shallow", spec_for((40, 40), 3, "uint8"), False, normalize_images=True)
    frame = torch.full((4, 2, 40, 40), 255, dtype=torch.uint8)  # [T+1, B, ...]
    frame[:2, 1] = 51
    mask = torch.zeros(3, 2, dtype=torch.bool)
    mask[:2, 1] = True
    model.observe_frames(frame, mask)
    moments = model.encoder.images._moments
    assert moments.count == 2
    torch.testing.assert_close(moments.mean, torch.full_like(moments.mean, 0.2))


def test_of_a_large_batch_some_frames_are_taken_in(monkeypatch):
    monkeypatch.setattr(agents, "MAX_OBSERVED", 10)
    model = make_model("shallow", spec_for((40, 40), 3, "uint8"), False, normalize_images=True)
    frame = torch.randint(256, (8, 5, 40, 40), dtype=torch.uint8)
    for number in (1, 2):
        model.observe_frames(frame, torch.ones(7, 5, dtype=torch.bool))
        assert model.encoder.images._moments.count == 10 * number


def test_images_in_a_tree_are_normalised_beside_floats_that_are_too():
    observation = {"camera": ArraySpec("uint8", (40, 40)), "speed": ArraySpec("float32", (2,))}
    spec = Spec(observation, discrete(3))
    model = make_model("auto", spec, False, normalize_observations=True, normalize_images=True)
    frame = {
        "camera": torch.full((3, 4, 40, 40), 51, dtype=torch.uint8),
        "speed": torch.randn(3, 4, 2) + 7,
    }
    model.observe_frames(frame, torch.ones(2, 4, dtype=torch.bool))
    [net] = model.agent.encoder.images
    torch.testing.assert_close(net.images._moments.mean, torch.full((1, 40, 40), 0.2).double())
    assert model.moments[0].mean.mean() == pytest.approx(7, abs=1.5)
    rest = {name: torch.zeros(3, 4) for name in ("reward", "last_action", "done")}
    output, _ = model({"frame": frame, **rest})
    assert output["baseline"].isfinite().all()


def test_statistics_of_pixels_are_in_checkpoints():
    spec = spec_for((4, 84, 84), 3)
    first, second = (make_model("auto", spec, False, normalize_images=True) for _ in range(2))
    first.observe_frames(games(64).unsqueeze(0).expand(2, -1, -1, -1, -1), EVERYWHERE)
    second.load_state_dict(first.state_dict())
    frames = games(3, seed=1)
    assert second.encoder(frames).equal(first.encoder(frames))


def test_models_of_ones_own_scale_their_frames_themselves():
    flags = TrainingFlags(env="Mock", model="package.module:Class", normalize_images=True)
    with pytest.raises(UsageError, match="--normalize_images is for the built-in nets"):
        flags.validate()


@pytest.mark.parametrize("change", ["observe", "copy", "load", "deepcopy", "publish"])
def test_what_is_kept_of_the_statistics_follows_them(change):
    """The agent uses them in many passes, and makes of them what it needs only once."""
    images, other = Images(GREY, normalize=True), Images(GREY, normalize=True)
    images.observe(games(20))
    other.observe(games(21, seed=7).flip(2))
    frame, kept = games(3, seed=1), images
    with torch.inference_mode():
        before = kept(frame)
    if change == "observe":
        kept.observe(games(20, seed=7).flip(2))
    elif change == "copy":
        for ours, theirs in zip(tensors_of(kept), tensors_of(other), strict=True):
            ours.data.copy_(theirs)
    elif change == "load":
        kept.load_state_dict(other.state_dict())
    elif change == "deepcopy":
        kept = copy.deepcopy(images)
        assert kept._last_normal is None  # or its tensors could have been changed as often
        kept.load_state_dict(other.state_dict())
    else:
        actors = ActorModel(images, torch.device("cpu"))
        with actors.newest() as (model, _), torch.inference_mode():
            assert torch.equal(model(frame), before)
        actors.publish(other, 1)
        with actors.newest() as (model, _):
            kept = model
    fresh = Images(GREY, normalize=True)
    fresh.load_state_dict(kept.state_dict())
    assert not torch.equal(kept(frame), before)
    assert torch.equal(kept(frame), fresh(frame))


def test_what_was_kept_while_acting_is_of_use_for_learning():
    model = make_model("shallow", spec_for((4, 84, 84), 6), False, normalize_images=True)
    batch = {"frame": games(2).unsqueeze(0), "reward": torch.zeros(1, 2)}
    batch |= {"done": torch.zeros(1, 2).bool(), "last_action": torch.zeros(1, 2).long()}
    with torch.inference_mode():
        model(batch, ())
    model(batch, ())[0]["baseline"].sum().backward()
    assert all(p.grad is not None for p in model.encoder.parameters())
