"""The first environments that dial in decide how large the model is, within what there is."""

import dataclasses

import psutil
import pytest
import torch
from torch import nn

from libtorchbeast.rows import Spec
from libtorchbeast.specs import ArraySpec, discrete
from torchbeast.core.learner import Learner
from torchbeast.core.settings import Settings
from torchbeast.errors import UsageError
from torchbeast.models import make_model
from torchbeast.run import model_size
from torchbeast.runtime.inference_model import ActorModel

GIB, MIB = 1 << 30, 1 << 20


@pytest.fixture
def one_gib(monkeypatch):
    """A machine with so much memory."""
    monkeypatch.setattr(model_size, "_smallest_memory", lambda: GIB)


def spec_for(shape):
    return Spec(ArraySpec("float32", shape), discrete(3))


def bytes_of(tensors):
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))


@pytest.mark.parametrize("optimizer", ["rmsprop", "adam", "adamw", "sgd"])
@pytest.mark.parametrize(("model", "shape"), [("deep", (4, 84, 84)), ("mlp", (7,))])
def test_the_size_is_that_of_the_real_thing(model, shape, optimizer):
    settings = dataclasses.replace(Settings(), optimizer=optimizer, momentum=0.5)
    with torch.device("meta"):
        size = model_size.measure(make_model(model, spec_for(shape), use_lstm=True), settings)
    learner = Learner(
        make_model(model, spec_for(shape), use_lstm=True), settings, torch.device("cpu")
    )
    for parameter in learner.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    learner.optimizer.step()
    parameters = bytes_of(learner.model.parameters())
    weights = parameters + bytes_of(learner.model.buffers())
    state = bytes_of(v for state in learner.optimizer.state.values() for v in state.values())
    assert (size.weights, size.gradients, size.optimizer) == (weights, parameters, state)
    actors = ActorModel(learner.model, torch.device("cpu"), num_users=2)
    copies = [actors._newest, *actors._spare]
    assert size.total(len(copies)) == weights * (1 + len(copies)) + parameters + state


def test_nothing_is_built_to_find_out_and_no_random_number_is_drawn(one_gib):
    before, state = psutil.Process().memory_info().rss, torch.get_rng_state()
    with pytest.raises(UsageError, match=r"a model of 192 MiB.* would take 1153 MiB, of 512 MiB"):
        model_size.check_fits(
            lambda: make_model("mlp", spec_for((393_216,)), False), Settings(), 3, rollout_bytes=MIB
        )
    model_size.check_fits(lambda: make_model("mlp", spec_for((8,)), False), Settings(), 3, MIB)
    assert psutil.Process().memory_info().rss - before < 100 * MIB
    assert torch.equal(torch.get_rng_state(), state)


def test_rollouts_that_do_not_fit_are_reason_enough(one_gib):
    with pytest.raises(UsageError, match="their rollouts would take 600 MiB, of 512 MiB"):
        model_size.check_fits(pytest.fail, Settings(), 3, rollout_bytes=600 * MIB)


class NeedsMemory(nn.Module):
    """A model of one's own that looks at its numbers while it is made."""

    def __init__(self, num_features):
        super().__init__()
        self.linear = nn.Linear(num_features, 16)
        self.largest = (
            self.linear.weight.detach().max().item()
        )  # on the meta device there is no number


def test_a_model_that_cannot_be_built_without_memory_is_built_with_it(one_gib, caplog):
    model_size.check_fits(lambda: NeedsMemory(8), Settings(), 3, rollout_bytes=MIB)
    assert "cannot be built on the meta device" in caplog.text
    with pytest.raises(UsageError, match="a model of 64 MiB"):
        model_size.check_fits(lambda: NeedsMemory(MIB), Settings(), 7, rollout_bytes=MIB)
