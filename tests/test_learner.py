"""The learner's step: which rows count, what is reported, and that a formula is not off by one."""

import copy
import dataclasses
import math

import pytest
import torch
from torch import nn

from tests.helpers.batches import make_batch
from tests.helpers.specs import spec_for
from tests.helpers.threads import run_in_threads
from torchbeast.core import learner as learner_module
from torchbeast.core import losses, precision, vtrace
from torchbeast.core.learner import Learner, finished_episodes
from torchbeast.core.losses import compute_loss
from torchbeast.core.optimizers import load_optimizer, make_optimizer, without_compiler
from torchbeast.core.precision import autocast
from torchbeast.core.ranks import OneRank
from torchbeast.core.rollout_batch import pick_columns
from torchbeast.models import make_model, unroll_lstm
from torchbeast.run.flags import TrainingFlags
from torchbeast.runtime.inference_model import ActorModel, prepare_to_act

T, B, A = 6, 3, 4
FLAGS = TrainingFlags(
    env="Catch",
    total_steps=10_000,
    unroll_length=T,
    batch_size=B,
    entropy_cost=0.01,
    reward_clipping="abs_one",
    vtrace_lambda=1.0,
)


def random_batch(seed=0):
    def make_frame(num_rows, generator):
        return torch.randn(num_rows, B, 7, generator=generator)

    generator = torch.Generator().manual_seed(seed)
    return make_batch(generator, T, B, A, make_frame, version=torch.tensor([0, 1, 2]))


def make_learner(flags=FLAGS, model=None):
    torch.manual_seed(0)
    model = model or make_model("mlp", spec_for((7,), A), use_lstm=False)
    return Learner(model, flags, torch.device("cpu"))


class Normalised(nn.Module):
    """An agent with batch normalisation, whose buffers each forward pass changes."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(7)
        self.agent = make_model("mlp", spec_for((7,), A), use_lstm=False)

    def forward(self, inputs, state=()):
        frame = self.norm(inputs["frame"].flatten(0, 1)).view_as(inputs["frame"])
        return self.agent({**inputs, "frame": frame}, state)


def test_the_loss_takes_rewards_and_ends_from_the_next_row():
    model, batch = make_learner().model, random_batch()
    output, _ = model(batch)
    targets = vtrace.from_logits(
        batch["policy_logits"],
        output["policy_logits"][:-1],
        batch["action"],
        discounts=0.99 * (1 - batch["done"][1:].float()),
        rewards=batch["reward"][1:].clamp(-1, 1),
        values=output["baseline"][:-1],
        bootstrap_value=output["baseline"][-1],
    )
    expected = (
        losses.compute_policy_gradient_loss(
            output["policy_logits"][:-1], batch["action"], targets.pg_advantages
        )
        + 0.5 * losses.compute_baseline_loss(targets.vs - output["baseline"][:-1])
        + 0.01 * losses.compute_entropy_loss(output["policy_logits"][:-1])
    )
    loss, metrics = compute_loss(model, batch, (), FLAGS)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(
        metrics["total_loss"],
        metrics["pg_loss"] + metrics["baseline_loss"] + metrics["entropy_loss"],
    )


def test_what_stands_on_row_zero_except_the_frame_is_not_learnt_twice():
    model, batch = make_learner().model, random_batch()
    loss, _ = compute_loss(model, batch, (), FLAGS)
    batch["reward"][0] += 1.0
    batch["done"][0] = ~batch["done"][0]
    batch["truncated"][0] = True
    again, _ = compute_loss(model, batch, (), FLAGS)
    torch.testing.assert_close(again, loss)


def test_nothing_is_learnt_from_padding():
    """Whatever stands in a column after its last real row, loss and gradient are the same."""
    model, gradients = make_learner().model, []
    for fill in (0.0, 7.0):
        batch = random_batch()
        last_real = 3
        batch["truncated"][last_real + 1 :, 1] = True
        for name in ("frame", "reward", "episode_return"):
            batch[name][last_real + 1 :, 1] = fill
        batch["policy_logits"][last_real:, 1] = fill
        model.zero_grad()
        loss, _ = compute_loss(model, batch, (), FLAGS)
        loss.backward()
        gradients.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


def test_a_time_limit_splits_the_loss_in_two():
    """Rows up to the true final frame and rows from the reset on are two rollouts, added up."""
    model, batch = make_learner().model, random_batch()
    batch["done"][:] = False
    reset = 4  # row 3 is the true final frame, row 4 the extra row
    batch["done"][reset] = batch["truncated"][reset] = True

    def rows(start, end):
        return {name: value[start:end] for name, value in batch.items()}

    whole, _ = compute_loss(model, batch, (), FLAGS)
    before, _ = compute_loss(model, rows(0, reset), (), FLAGS)
    after, _ = compute_loss(model, rows(reset, T + 1), (), FLAGS)
    torch.testing.assert_close(whole, before + after)


def test_only_finished_episodes_are_reported():
    batch = random_batch()
    batch["done"][:] = False
    batch["episode_step"][:] = 5
    batch["done"][0, 0] = True  # counted with the rollout before
    batch["done"][2, 1], batch["episode_return"][2, 1] = True, 12.0
    batch["done"][3, 2], batch["episode_step"][3, 2] = True, 0  # a lost life
    batch["truncated"][5, 0] = batch["done"][5, 0] = True
    batch["episode_return"][5, 0] = -3.0
    returns, lengths = finished_episodes(batch)
    assert sorted(returns) == [-3.0, 12.0]
    assert lengths == [5, 5]


def test_statistics_have_no_phantoms():
    learner = make_learner()
    batch = random_batch()
    batch["done"][:] = False
    learner.step(batch, ())
    summary = learner.stats.summary()
    assert summary["mean_episode_return"] is None
    assert summary["step"] == T * B
    assert all(math.isfinite(v) for v in summary.values() if v is not None)
    batch["done"][2, 1], batch["episode_return"][2, 1] = True, 12.0
    learner.step(batch, ())
    summary = learner.stats.summary()
    assert summary["mean_episode_return"] == 12.0
    assert summary["policy_lag"] == pytest.approx(0.0)  # version 1 learns from 0, 1 and 2
    assert summary["episodes"] == 1


def test_the_learning_rate_goes_linearly_to_zero():
    flags = dataclasses.replace(FLAGS, total_steps=4 * T * B, learning_rate=0.8)
    learner = make_learner(flags)
    rates = []
    for _ in range(5):
        rates.append(learner.optimizer.param_groups[0]["lr"])
        batch = random_batch()
        learner.step(batch, ())
    assert rates == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.0])


def test_gradients_are_clipped_by_their_global_norm():
    flags = dataclasses.replace(FLAGS, grad_norm_clipping=0.5)
    learner = make_learner(flags)
    learner.step(random_batch(), ())
    norm = torch.stack([p.grad.norm() for p in learner.model.parameters()]).norm()
    assert norm.item() == pytest.approx(0.5, rel=1e-4)
    assert learner.stats.summary()["grad_norm"] > 0.5  # what it was before


def test_rollouts_with_a_gradient_that_is_not_finite_are_left_out(caplog):
    """The update is the one of the other rollouts; the log says who sent these, and what."""
    learner, clean = make_learner(), make_learner()
    learner.name_source = lambda source: f"environment {source} of worker 7"
    batch, without = random_batch(), pick_columns(random_batch(), [1, 2])
    batch["source"] = torch.tensor([40, 41, 42])
    batch["reward"][2, 0] = float("nan")
    learner.step(batch, ())
    clean.step(without, ())
    for ours, theirs in zip(learner.model.parameters(), clean.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    summary = learner.stats.summary()
    assert (summary["updates"], summary["step"]) == (1, 2 * T)
    assert summary["nonfinite_rollouts"] == 1
    assert "skipped_updates" not in summary
    assert "environment 40 of worker 7 (rollout 0 of the batch): frame from -" in caplog.text
    assert "reward from nan to nan" in caplog.text
    assert "version 0; the newest weights have version 0" in caplog.text


def test_an_update_without_a_finite_gradient_is_skipped_and_harms_nothing(caplog):
    learner = make_learner(model=Normalised())
    learner.step(random_batch(1), ())
    before = {name: value.clone() for name, value in learner.model.state_dict().items()}
    optimizer_before = copy.deepcopy(learner.optimizer.state_dict())
    for i in range(3):
        batch = random_batch(i)
        batch["frame"][3] = float("inf")
        assert learner.update(batch, (), lambda *_: pytest.fail("published"))
    assert learner.version == 1
    assert learner.stats.step == T * B
    assert learner.stats.summary()["skipped_updates"] == 3
    for name, value in learner.model.state_dict().items():
        assert torch.equal(value, before[name]), name
    for index, state in learner.optimizer.state_dict()["state"].items():
        for name, value in state.items():
            assert torch.equal(value, optimizer_before["state"][index][name])
    assert caplog.text.count("is not finite") == 1  # repeats are folded
    learner.step(random_batch(2), ())
    assert learner.version == 2


def test_training_ends_after_many_skipped_updates_in_a_row(monkeypatch):
    monkeypatch.setattr(learner_module, "MAX_SKIPPED_UPDATES", 3)
    learner = make_learner()
    bad = random_batch()
    bad["reward"][2] = float("nan")
    for batch in (bad, bad, random_batch(), bad, bad):
        learner.step(batch, ())
    with pytest.raises(FloatingPointError, match=r"3 updates in a row .* rollout 0 of the batch"):
        learner.update(bad, (), lambda *_: pytest.fail("published"))
    assert not learner.lock.locked()


def test_gradients_that_stay_infinite_end_no_run_that_had_clients(monkeypatch, caplog):
    """They may be a client's doing; without clients there is nobody else to wait for."""
    monkeypatch.setattr(learner_module, "MAX_SKIPPED_UPDATES", 2)
    learner = make_learner()
    learner.rounds.had_clients = lambda: True
    bad = random_batch()
    bad["reward"][2] = float("nan")
    for _ in range(4):
        assert learner.update(bad, (), lambda *_: pytest.fail("published"))
    assert caplog.text.count("The run goes on, as it may be a client's doing.") == 1
    assert learner.stats.summary()["skipped_updates"] == 4
    assert learner.update(random_batch(), (), lambda *_: None)
    assert learner.version == 1


def test_huge_frames_of_one_environment_end_nothing():
    """As large as the network lets through: some gradient is infinite then, but no weight is."""
    torch.manual_seed(0)
    model = make_model("deep", spec_for((4, 36, 36), A), use_lstm=False)
    learner = Learner(model, FLAGS, torch.device("cpu"))
    for i in range(3):
        batch = random_batch(i)
        batch["frame"] = torch.randn(T + 1, B, 4, 36, 36)
        batch["frame"][:, 1] = 1e9 * torch.randn(T + 1, 4, 36, 36).sign()
        learner.step(batch, model.initial_state(B))
    assert learner.version == 3
    assert learner.stats.summary()["nonfinite_rollouts"] == 3
    for name, value in learner.model.state_dict().items():
        assert value.isfinite().all(), name
    output, _ = model({k: v[:1] for k, v in batch.items()}, model.initial_state(B))
    assert output["policy_logits"].isfinite().all()


def test_the_fraction_of_clipped_weights_is_counted():
    learner, batch = make_learner(), random_batch()
    with torch.no_grad():
        batch["policy_logits"] = learner.model(batch)[0]["policy_logits"][:T].clone()
    batch["policy_logits"][0].scatter_(-1, batch["action"][0].unsqueeze(-1), -9.0)  # was unlikely
    batch["policy_logits"][1:].scatter_(-1, batch["action"][1:].unsqueeze(-1), 9.0)  # was certain
    _, metrics = compute_loss(learner.model, batch, (), FLAGS)
    assert metrics["clipped_rho_fraction"].item() == pytest.approx(1 / T)


def test_flags_given_at_a_resume_hold():
    learner = make_learner()
    learner.step(random_batch(), ())
    changed = dataclasses.replace(
        FLAGS, learning_rate=0.5, alpha=0.7, epsilon=0.2, momentum=0.9, total_steps=2 * T * B
    )
    resumed = make_learner(changed)
    resumed.load_state_dict(learner.state_dict())
    (group,) = resumed.optimizer.param_groups
    assert group["lr"] == pytest.approx(0.25)  # half of the new total is done
    assert (group["alpha"], group["eps"], group["momentum"]) == (0.7, 0.2, 0.9)
    resumed.step(random_batch(1), ())
    assert resumed.optimizer.param_groups[0]["lr"] == 0.0


def test_the_learning_rate_may_stay_as_it_is():
    learner = make_learner(dataclasses.replace(FLAGS, schedule="constant", total_steps=4 * T * B))
    for _ in range(3):
        learner.step(random_batch(), ())
        assert learner.optimizer.param_groups[0]["lr"] == FLAGS.learning_rate


OPTIMIZERS = {
    "rmsprop": torch.optim.RMSprop,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_without_the_compiler_take_the_steps_of_pytorchs_own(name):
    kinds = (OPTIMIZERS[name], without_compiler(OPTIMIZERS[name]))
    weights = [torch.nn.Parameter(torch.linspace(-1, 1, 7)) for _ in kinds]
    for kind, weight in zip(kinds, weights, strict=True):
        optimizer = kind([weight], lr=0.1, foreach=True)
        for i in range(5):
            optimizer.zero_grad()
            (weight * (weight + i)).sum().backward()
            optimizer.step()
    assert torch.equal(*weights)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_goes_on_after_a_resume_as_if_there_had_been_none(name):
    flags = dataclasses.replace(FLAGS, optimizer=name, momentum=0.5, adam_epsilon=0.1)
    learner = make_learner(flags)
    assert isinstance(learner.optimizer, OPTIMIZERS[name])
    learner.step(random_batch(0), ())
    resumed = make_learner(flags)
    resumed.load_state_dict(copy.deepcopy(learner.state_dict()))
    for each in (learner, resumed):
        each.step(random_batch(1), ())
    before = make_learner(flags).model.parameters()
    for ours, theirs, first in zip(
        learner.model.parameters(), resumed.model.parameters(), before, strict=True
    ):
        assert torch.equal(ours, theirs)
        assert not torch.equal(ours, first)
    eps = learner.optimizer.param_groups[0].get("eps")
    assert eps == {"rmsprop": 0.01, "adam": 0.1, "adamw": 0.1, "sgd": None}[name]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_fast_kind_of_an_optimizer_steps_as_the_plain_one(name):
    """Also after a resume from a checkpoint that the plain one has written."""
    flags = dataclasses.replace(FLAGS, optimizer=name, momentum=0.5 * (name == "rmsprop"))
    model = make_model("mlp", spec_for((7,), A), use_lstm=False)
    fast, other = make_optimizer(model, flags), copy.deepcopy(model)
    plain = make_optimizer(other, flags)
    for group in plain.param_groups:
        group.update(foreach=False, fused=None)
    for step in range(4):
        if step == 2:
            load_optimizer(fast, copy.deepcopy(plain.state_dict()), flags, flags.learning_rate)
            assert fast.param_groups[0]["fused" if name != "rmsprop" else "foreach"] is True
        torch.manual_seed(step)
        for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
            ours.grad = torch.randn_like(ours)
            theirs.grad = ours.grad.clone()
        fast.step()
        plain.step()
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_weight_may_get_its_first_gradient_later_than_others(name):
    model = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
    optimizer = make_optimizer(model, dataclasses.replace(FLAGS, optimizer=name, momentum=0.5))
    before = copy.deepcopy(model)
    for used in ([0], [0, 1]):
        optimizer.zero_grad()
        sum(model[i](torch.ones(2)) for i in used).backward()
        optimizer.step()
    for ours, first in zip(model.parameters(), before.parameters(), strict=True):
        assert not torch.equal(ours, first)


@pytest.mark.parametrize("name", ["rmsprop", "adam"])
def test_a_resumed_state_lies_in_memory_as_its_weights_do(name):
    """A fused step does not look at strides."""
    flags = dataclasses.replace(FLAGS, optimizer=name)
    model = nn.Conv2d(3, 4, 2)
    other = copy.deepcopy(model).to(memory_format=torch.channels_last)
    optimizer, resumed = make_optimizer(model, flags), make_optimizer(other, flags)

    def step(model, optimizer, seed):
        torch.manual_seed(seed)
        for weight in model.parameters():
            weight.grad = torch.empty_like(weight).copy_(torch.randn(weight.shape))
        optimizer.step()

    step(model, optimizer, seed=0)
    other.load_state_dict(model.state_dict())
    load_optimizer(resumed, copy.deepcopy(optimizer.state_dict()), flags, flags.learning_rate)
    step(model, optimizer, seed=1)
    step(other, resumed, seed=1)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_another_optimizer_after_a_resume_begins_anew_and_says_so(caplog):
    learner = make_learner()
    learner.step(random_batch(0), ())
    state = copy.deepcopy(learner.state_dict())
    resumed = make_learner(dataclasses.replace(FLAGS, optimizer="adam", learning_rate=0.1))
    resumed.load_state_dict(state)
    assert "written with --optimizer rmsprop; adam begins with a new state" in caplog.text
    assert resumed.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * (1 - T * B / 10_000))
    resumed.step(random_batch(1), ())
    assert resumed.version == 2
    del state["optimizer"]  # as older checkpoints are
    make_learner().load_state_dict(state)
    assert caplog.text.count("begins with a new state") == 1


class WithLosses(nn.Module):
    """Has a loss for each row and one that is a number."""

    def __init__(self, **losses):
        super().__init__()
        self.agent = make_model("mlp", spec_for((7,), A), use_lstm=False)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.losses = losses

    def forward(self, inputs, state=()):
        output, state = self.agent(inputs, state)
        losses = {name: self.scale * loss for name, loss in self.losses.items()}
        return {**output, "losses": losses}, state


@pytest.mark.parametrize("num_rows", [T, T + 1])
def test_a_models_own_losses_are_masked_added_and_logged(num_rows):
    rows = torch.arange(1.0, num_rows * B + 1).view(num_rows, B)
    learner = make_learner(model=WithLosses(number=torch.tensor(3.0), rows=rows))
    batch = random_batch()
    batch["truncated"][4, 1] = batch["done"][4, 1] = True  # so row 3 of column 1 teaches nothing
    plain, _ = compute_loss(learner.model.agent, batch, (), FLAGS)
    expected = sum(
        rows[t, b].item() for t in range(T) for b in range(B) if not batch["truncated"][t + 1, b]
    )
    loss, metrics = compute_loss(learner.model, batch, (), FLAGS)
    assert metrics["rows"].item() == 2 * expected
    assert metrics["number"].item() == 6.0
    assert loss.item() == pytest.approx(plain.item() + 2 * expected + 6.0)
    learner.step(batch, ())
    assert learner.stats.summary()["rows"] == 2 * expected
    (gradient,) = torch.autograd.grad(compute_loss(learner.model, batch, (), FLAGS)[0],
                                      learner.model.scale)  # fmt: skip
    assert gradient.item() == pytest.approx(expected + 3.0)


def test_a_models_own_losses_of_another_shape_or_name_get_one_sentence():
    wrong = WithLosses(mine=torch.zeros(B))
    with pytest.raises(ValueError, match=r"'mine' must be .* \[7, 3\] of them, got \[3\]"):
        compute_loss(wrong, random_batch(), (), FLAGS)
    with pytest.raises(ValueError, match="another name than 'pg_loss'"):
        compute_loss(WithLosses(pg_loss=torch.tensor(0.0)), random_batch(), (), FLAGS)


def test_rollouts_of_weights_too_old_are_dropped_and_counted():
    flags = dataclasses.replace(FLAGS, max_policy_lag=2)
    learner, fresh = make_learner(flags), make_learner()
    for each in (learner, fresh):
        each.stats.updates = 3  # so that the first rollout, of version 0, is 3 behind
    batch, without = random_batch(), random_batch()
    without["truncated"][:, 0] = True
    learner.step(batch, ())
    fresh.step(without, ())
    summary = learner.stats.summary()
    assert summary["dropped_rollouts"] == 1
    assert summary["policy_lag"] == fresh.stats.summary()["policy_lag"] > 0
    assert learner.stats.step == T * (B - 1)
    for ours, theirs in zip(learner.model.parameters(), fresh.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_rollouts_that_were_held_back_are_dropped_by_default():
    learner, batch = make_learner(FLAGS), random_batch()
    learner.stats.updates = 1000
    batch["version"] = torch.full((T, B), 999)
    batch["version"][:, 1] = -1  # 1001 updates old
    learner.step(batch, ())
    assert learner.stats.summary()["dropped_rollouts"] == 1


def test_a_batch_with_nothing_to_learn_makes_no_version():
    """Or the rollouts to come would be older still, and dropped in their turn."""
    learner = make_learner(dataclasses.replace(FLAGS, max_policy_lag=0))
    learner.stats.updates = 5
    before = [p.clone() for p in learner.model.parameters()]
    learner.step(random_batch(), ())
    assert learner.version == 5
    assert learner.stats.step == 0
    assert learner.stats.summary()["dropped_rollouts"] == B
    assert all(torch.equal(a, b) for a, b in zip(before, learner.model.parameters(), strict=True))


def test_padding_has_no_version_and_no_lag():
    flags = dataclasses.replace(FLAGS, max_policy_lag=1)
    learner, batch = make_learner(flags), random_batch()
    learner.stats.updates = 100
    batch["version"] = torch.full((T, B), 100)
    batch["version"][4:, 0] = 0  # as memory is left where nobody acted
    batch["truncated"][5:, 0] = True
    batch["done"][5:, 0] = True
    learner.step(batch, ())
    summary = learner.stats.summary()
    assert summary["dropped_rollouts"] == 0
    assert summary["policy_lag"] == 0


def test_every_pass_goes_through_what_is_wrapped_around_the_loss():
    calls = []

    class Wrapped(torch.nn.Module):
        def __init__(self, loss):
            super().__init__()
            self.module = loss

        def forward(self, *args):
            calls.append(1)
            return self.module(*args)

    class Wrapping(OneRank):
        def wrap(self, loss, device):
            return Wrapped(loss)

    model = make_model("mlp", spec_for((7,), A), use_lstm=False)
    learner = Learner(model, FLAGS, torch.device("cpu"), ranks=Wrapping())
    learner.step(random_batch(), ())
    assert len(calls) == 1
    assert set(learner.state_dict()["model_state_dict"]) == set(model.state_dict())


def test_bfloat16_gives_about_the_same_loss_and_float32_weights():
    batch = random_batch()
    flags = dataclasses.replace(FLAGS, autocast="bf16")
    exact, _ = compute_loss(make_learner().model, batch, (), FLAGS)
    rough, _ = compute_loss(make_learner().model, batch, (), flags)
    assert rough.dtype == torch.float32
    assert rough != exact
    assert rough.item() == pytest.approx(exact.item(), rel=0.05)


@pytest.mark.parametrize("has_it", [False, True])
def test_bfloat16_is_chosen_by_what_the_device_has_instructions_for(has_it, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": has_it})
    precision.computes_bf16.cache_clear()
    with autocast(torch.device("cpu"), "auto"):
        assert torch.is_autocast_enabled("cpu") == has_it
    for dtype, enabled in (("none", False), ("bf16", True)):
        with autocast(torch.device("cpu"), dtype):
            assert torch.is_autocast_enabled("cpu") == enabled
    precision.computes_bf16.cache_clear()


@pytest.mark.parametrize("use_lstm", [False, True])
def test_bfloat16_spares_memory_and_heads(use_lstm):
    """With values around 50, a head in bfloat16 rounds them to quarters: an error of 0.02 to 0.04
    here, which the encoder alone does not make."""
    torch.manual_seed(0)
    model = make_model("shallow", spec_for((4, 84, 84), A), use_lstm)
    with torch.no_grad():
        model.baseline.bias += 50.0
    batch, state = random_batch(), model.initial_state(B)
    batch["frame"] = torch.randint(256, (T + 1, B, 4, 84, 84), dtype=torch.uint8)
    batch["done"][:] = False
    advantages = []
    for dtype in ("none", "bf16"):
        with autocast(torch.device("cpu"), dtype), torch.no_grad():
            output, memory = model(batch, state)
        assert all(x.dtype == torch.float32 for x in (*memory, output["baseline"]))
        rewards = batch["reward"][1:].clamp(-1, 1)
        values = output["baseline"]
        advantages.append(rewards + 0.99 * values[1:] - values[:-1])
    assert (advantages[0] - advantages[1]).abs().mean() < 0.003 * advantages[0].std()
    assert not torch.equal(*advantages)  # the encoder is in bfloat16
    learner = Learner(model, dataclasses.replace(FLAGS, autocast="bf16"), torch.device("cpu"))
    learner.step(batch, state)
    assert learner.version == 1


class OwnMemory(nn.Module):
    """A model as in docs/your_environment.md: a body, an LSTM, heads."""

    def __init__(self):
        super().__init__()
        self.body, self.lstm = nn.Linear(7, 16), nn.LSTM(16, 16)
        self.policy, self.baseline = nn.Linear(16, A), nn.Linear(16, 1)

    def forward(self, inputs, state):
        body = self.body(inputs["frame"])
        self.seen = body.detach()
        core, state = unroll_lstm(self.lstm, body, inputs["done"], state)
        logits = self.policy(core)
        baseline = self.baseline(core)[..., 0]
        return {"policy_logits": logits, "baseline": baseline, "action": logits.argmax(-1)}, state


def test_the_memory_of_an_own_model_is_float32_under_bfloat16():
    """The LSTM makes of what it sees, which is rounded, what it would make of it in float32."""
    torch.manual_seed(0)
    model, batch = OwnMemory(), random_batch()
    state = (torch.randn(1, B, 16), torch.randn(1, B, 16))
    with autocast(torch.device("cpu"), "bf16"), torch.no_grad():
        _, memory = model(batch, state)
    assert model.seen.dtype == torch.bfloat16
    _, expected_memory = unroll_lstm(model.lstm, model.seen.float(), batch["done"], state)
    for found, exact in zip(memory, expected_memory, strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-6)
    learner = make_learner(dataclasses.replace(FLAGS, autocast="bf16"), model)
    learner.step(batch, state)
    assert learner.version == 1
    assert all(p.isfinite().all() for p in model.parameters())


def test_models_may_answer_with_a_tuple_as_in_torchbeast():
    model, batch = make_learner().model, random_batch()

    def as_tuple(inputs, state):
        output, state = model(inputs, state)
        return (output["action"], output["policy_logits"], output["baseline"]), state

    expected, _ = compute_loss(model, batch, (), FLAGS)
    loss, _ = compute_loss(as_tuple, batch, (), FLAGS)
    assert loss.item() == pytest.approx(expected.item())


@pytest.mark.slow
def test_a_compiled_model_learns_and_acts_alike(monkeypatch):
    """With dynamo's graphs run by PyTorch itself: to generate code for them takes half a minute."""
    compile_with = nn.Module.compile
    monkeypatch.setattr(
        nn.Module, "compile", lambda self, **how: compile_with(self, backend="eager", **how)
    )
    plain, compiled = make_learner(), make_learner(dataclasses.replace(FLAGS, compile=True))
    for learner in (plain, compiled):
        torch.manual_seed(1)
        learner.step(random_batch(), ())
    for (name, ours), (other, theirs) in zip(
        plain.model.state_dict().items(), compiled.model.state_dict().items(), strict=True
    ):
        assert name == other
        torch.testing.assert_close(ours, theirs)

    actor_model = ActorModel(compiled.model, torch.device("cpu"), version=1, compile=True)
    with actor_model.newest() as (model, _), torch.no_grad():
        for num_rows in (1, 5, 2):
            row = {
                name: leaf[:1, :1].expand(1, num_rows, *leaf.shape[2:])
                for name, leaf in random_batch().items()
                if name in ("frame", "reward", "done", "last_action")
            }
            expected, _ = plain.model(row)
            output, _ = model(row)
            torch.testing.assert_close(output["policy_logits"], expected["policy_logits"])


# --- The update: lock, step, publish, finished? -------------------------------------------------


def test_each_update_is_published_until_training_is_finished():
    learner = make_learner(dataclasses.replace(FLAGS, total_steps=3 * T * B))
    published = []

    def publish(model, version):
        assert learner.lock.locked()
        assert model is learner.model
        published.append((version, learner.stats.step))

    goes_on = [learner.update(random_batch(i), (), publish) for i in range(5)]
    assert goes_on == [True, True, False, False, False]
    assert published == [(1, T * B), (2, 2 * T * B), (3, 3 * T * B)]
    assert learner.finished.is_set()


def test_nothing_is_learnt_once_somebody_has_ended_the_run():
    learner = make_learner()
    learner.finished.set()
    assert not learner.update(random_batch(), (), lambda *_: pytest.fail("published"))
    assert learner.version == 0


def test_threads_update_one_after_the_other():
    learner = make_learner()
    versions = []

    def learn():
        for i in range(10):
            learner.update(random_batch(i), (), lambda _, version: versions.append(version))

    with run_in_threads(learn, learn, learn):
        pass
    assert versions == list(range(1, 31))
    assert learner.stats.step == 30 * T * B


def test_rollouts_that_say_no_version_are_taken_for_new():
    learner = make_learner(dataclasses.replace(FLAGS, max_policy_lag=0))
    learner.stats.updates = 5
    batch = random_batch()
    del batch["version"]
    learner.step(batch, ())
    summary = learner.stats.summary()
    assert summary["policy_lag"] == summary["dropped_rollouts"] == 0
    assert learner.version == 6


def test_the_latest_figures_can_be_read_without_taking_them():
    learner = make_learner()
    learner.step(random_batch(), ())
    latest = learner.stats.latest()
    assert latest["total_loss"] == learner.stats.latest()["total_loss"]
    assert latest["total_loss"] == pytest.approx(learner.stats.summary()["total_loss"])


class OwnDropout(nn.Dropout):
    """A layer of the user's own."""


class Wobbly(nn.Module):
    """Draws its actions in training mode, as agents do, and has layers with a mode, too."""

    def __init__(self):
        super().__init__()
        layers = (nn.BatchNorm1d(4), nn.Dropout(0.5), OwnDropout(0.5))
        self.body = nn.Sequential(*layers, nn.TransformerEncoderLayer(4, 2))

    def forward(self, x):
        return self.body(x), self.training


def test_an_agent_that_acts_samples_but_drops_nothing_out():
    learnt = Wobbly()
    learnt(torch.randn(16, 4))
    actor_model = ActorModel(learnt, torch.device("cpu"))
    x = torch.randn(5, 4)
    with actor_model.newest() as (model, _):
        first, samples = model(x)
        again, _ = model(x)
        mean = model.body[0].running_mean.clone()
    assert samples
    assert torch.equal(first, again)
    assert torch.equal(mean, learnt.body[0].running_mean)
    assert learnt.body[1].training  # the learner's own is as it was
    assert prepare_to_act(make_model("mlp", spec_for((7,), A), use_lstm=False)).training
