"""The agent's copies of the model: what they say, next to what the learner computes."""

import pytest
import torch

from tests.helpers.specs import spec_for
from torchbeast.core.precision import autocast
from torchbeast.models import make_model
from torchbeast.models.agent import Agent
from torchbeast.models.encoders import ShallowConv
from torchbeast.runtime import inference_model
from torchbeast.runtime.inference_model import ActorModel

CPU = torch.device("cpu")
N = 5


def a_row(frames):
    zeros = torch.zeros(1, N)
    return {"frame": frames, "reward": zeros, "done": zeros.bool(), "last_action": zeros.long()}


@pytest.fixture(autouse=True)
def any_cpu_has_bfloat16(monkeypatch):
    monkeypatch.setattr(inference_model, "computes_bf16", lambda device_type: True)


@pytest.mark.parametrize("encoder", ["shallow", "deep"])
def test_image_nets_act_in_bfloat16_if_the_learner_computes_in_it(encoder):
    torch.manual_seed(2)  # what rounding makes of the deep net's first weights differs by a lot
    model = make_model(encoder, spec_for((4, 84, 84), 6), False, normalize_images=True)
    frames = torch.randint(256, (1, N, 4, 84, 84), dtype=torch.uint8)
    actors = {kind: ActorModel(model, CPU, autocast=kind) for kind in ("none", "bf16")}
    model.observe_frames(frames, torch.ones(1, N, dtype=torch.bool))
    said, versions = {}, set()
    for kind, actor in actors.items():
        actor.publish(model, 7)
        with actor.newest() as (net, version), torch.inference_mode():
            said[kind] = net(a_row(frames), ())[0]
            versions.add(version)
    with torch.no_grad():
        exact = model(a_row(frames), ())[0]["baseline"]
        with autocast(CPU, "bf16"):
            learners = model(a_row(frames), ())[0]["baseline"]
    size = exact.abs().max()
    assert versions == {7}
    torch.testing.assert_close(said["none"]["baseline"], exact)
    assert (said["bf16"]["baseline"] - learners).abs().max() < 0.02 * size
    assert 0 < (said["bf16"]["baseline"] - exact).abs().max() < 0.05 * size
    assert all(said["bf16"][name].dtype == torch.float32 for name in ("policy_logits", "baseline"))


def test_the_learners_own_weights_stay_in_float32():
    model = make_model("shallow", spec_for((4, 84, 84), 6), False, normalize_images=True)
    ActorModel(model, CPU, autocast="bf16").publish(model, 1)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


class OwnAgent(Agent):
    """May do with features what it likes."""


SPEC = spec_for((4, 84, 84), 6)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.nn.Linear(2, 1),
        lambda: torch.nn.Sequential(ShallowConv(SPEC.observation), torch.nn.Linear(256, 1)),
        lambda: OwnAgent(SPEC.observation, SPEC.action),
    ],
)
def test_models_of_ones_own_keep_their_precision(make):
    with ActorModel(make(), CPU, autocast="bf16").newest() as (net, _):
        assert {p.dtype for p in net.parameters()} == {torch.float32}


def test_an_agent_on_a_device_that_is_slow_in_bfloat16_keeps_float32(monkeypatch):
    monkeypatch.setattr(inference_model, "computes_bf16", lambda device_type: False)
    model = make_model("shallow", SPEC, False)
    with ActorModel(model, CPU, autocast="bf16").newest() as (net, _):
        assert {p.dtype for p in net.parameters()} == {torch.float32}
