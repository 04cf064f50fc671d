"""The names that code written for TorchBeast knows, with its shapes, and the agent's weights."""

import argparse
import threading
import time

import pytest
import torch
from torch import nn

import libtorchbeast
from torchbeast import polybeast_learner
from torchbeast.core.actor_model import ActorModel
from torchbeast.errors import UsageError
from torchbeast.polybeast_learner import Net

T, B, A = 4, 3, 6
FLAGS = argparse.Namespace(
    learner_device=torch.device("cpu"),
    actor_device="cpu",
    reward_clipping="abs_one",
    discounting=0.99,
    baseline_cost=0.5,
    entropy_cost=0.01,
    grad_norm_clipping=40.0,
    total_steps=1000,
    unroll_length=T,
    batch_size=B,
)


def env_outputs(rows, batch):
    frame = torch.randint(256, (rows, batch, 4, 84, 84), dtype=torch.uint8)
    reward, done = torch.randn(rows, batch), torch.zeros(rows, batch, dtype=torch.bool)
    done[1:, 0] = True
    step = torch.full((rows, batch), 7, dtype=torch.int32)
    return frame, reward, done, step, torch.full((rows, batch), 2.5)


def rollouts(use_lstm):
    actions = torch.randint(A, (T + 1, B))
    outputs = (actions, torch.randn(T + 1, B, A), torch.randn(T + 1, B))
    state = Net(A, use_lstm).initial_state(B)
    return (env_outputs(T + 1, B), outputs), state


@pytest.mark.parametrize("use_lstm", [False, True])
def test_net_has_the_shapes_of_the_deep_net(use_lstm):
    net = Net(num_actions=A, use_lstm=use_lstm)
    state = net.initial_state(batch_size=B)
    assert [tuple(s.shape) for s in state] == ([(1, B, 256)] * 2 if use_lstm else [])
    frame, reward, done, *_ = env_outputs(T, B)
    (action, logits, baseline), new_state = net(
        {"frame": frame, "reward": reward, "done": done}, state
    )
    assert action.shape == baseline.shape == (T, B)
    assert logits.shape == (T, B, A)
    assert [s.shape for s in new_state] == [s.shape for s in state]


@pytest.mark.parametrize("use_lstm", [False, True])
def test_learn_updates_the_model_copies_it_and_fills_the_stats(use_lstm):
    torch.manual_seed(0)
    model, actor_model = Net(A, use_lstm), Net(A, use_lstm)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.001)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)
    stats, logged = {}, []

    class Logger:
        def log(self, figures):
            logged.append(dict(figures))

    batches = [rollouts(use_lstm), rollouts(use_lstm)]
    polybeast_learner.learn(
        FLAGS, batches, model, actor_model, optimizer, scheduler, stats, Logger()
    )
    assert stats["step"] == 2 * T * B
    for name in ("total_loss", "pg_loss", "baseline_loss", "entropy_loss"):
        assert isinstance(stats[name], float)
    assert stats["mean_episode_return"] == 2.5
    assert [figures["step"] for figures in logged] == [T * B, 2 * T * B]
    changed = [name for name, t in model.state_dict().items() if not torch.equal(t, before[name])]
    assert "agent.policy.weight" in changed
    for name, tensor in model.state_dict().items():
        assert torch.equal(actor_model.state_dict()[name], tensor), name


def test_two_threads_that_learn_count_in_the_same_stats():
    model, actor_model = Net(A), Net(A)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.001)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)
    queue = libtorchbeast.BatchingQueue(minimum_batch_size=B, maximum_batch_size=B)
    stats = {}
    args = (FLAGS, queue, model, actor_model, optimizer, scheduler, stats)
    threads = [threading.Thread(target=polybeast_learner.learn, args=args) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(6):
        queue.enqueue(rollouts(False))
    deadline = time.monotonic() + 60
    while stats.get("updates", 0) < 6 and time.monotonic() < deadline:
        time.sleep(0.01)
    queue.close()
    for thread in threads:
        thread.join(30)
    assert stats["updates"] == 6
    assert stats["step"] == 6 * T * B


def test_inference_answers_until_the_batcher_is_closed():
    batcher = libtorchbeast.DynamicBatcher(timeout_ms=10)
    model = Net(A, use_lstm=True)
    thread = threading.Thread(
        target=polybeast_learner.inference, args=(FLAGS, batcher, model), daemon=True
    )
    thread.start()
    state = model.initial_state(1)
    (action, logits, baseline), new_state = batcher.compute((env_outputs(1, 1), state))
    assert action.shape == baseline.shape == (1, 1)
    assert logits.shape == (1, 1, A)
    assert new_state[0].shape == (1, 1, 256)
    assert not torch.equal(new_state[0], state[0])
    batcher.close()
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_model_that_raises_in_inference_is_told_to_those_who_wait():
    batcher = libtorchbeast.DynamicBatcher(timeout_ms=10)

    def broken(inputs, state):
        raise ValueError("the model is out of tea")

    model = Net(A)
    model.forward = broken
    thread = threading.Thread(
        target=polybeast_learner.inference, args=(FLAGS, batcher, model), daemon=True
    )
    thread.start()
    with pytest.raises(ValueError, match="out of tea"):
        batcher.compute((env_outputs(1, 1), ()))
    thread.join(10)
    assert not thread.is_alive()


def test_losses_are_those_of_the_paper():
    advantages = torch.tensor([[1.0, -2.0], [0.5, 0.0]])
    assert polybeast_learner.compute_baseline_loss(advantages) == pytest.approx(0.5 * 5.25)
    logits = torch.zeros(2, 2, 4)
    entropy = polybeast_learner.compute_entropy_loss(logits)
    assert entropy.item() == pytest.approx(-4 * torch.log(torch.tensor(4.0)).item(), rel=1e-5)
    actions = torch.zeros(2, 2, dtype=torch.int64)
    loss = polybeast_learner.compute_policy_gradient_loss(logits, actions, advantages)
    assert loss.item() == pytest.approx(-0.5 * torch.log(torch.tensor(4.0)).item(), rel=1e-5)


# --- The agent's weights ----------------------------------------------------------------------


def constant(value):
    model = nn.Linear(64, 64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float(value))
    return model


def test_the_agent_always_has_one_whole_version_and_versions_only_grow():
    published = ActorModel(constant(0), torch.device("cpu"))
    stop, errors = threading.Event(), []

    def read():
        last = 0
        while not stop.is_set():
            with published.newest() as (model, version):
                values = {v for p in model.parameters() for v in p.detach().unique().tolist()}
                if values != {float(version)} or version < last:
                    errors.append((values, version, last))
                last = version

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for version in range(1, 300):
        published.publish(constant(version), version)
    stop.set()
    for thread in threads:
        thread.join(30)
    assert not errors
    assert len(published._spare) <= 4  # memory is reused, not collected


def test_weights_in_use_are_not_written_to():
    published = ActorModel(constant(1), torch.device("cpu"), version=1)
    with published.newest() as (model, version):
        for value in (2, 3, 4):
            published.publish(constant(value), value)
        assert version == 1
        assert model.weight.eq(1).all()
    with published.newest() as (model, version):
        assert version == 4
        assert model.weight.eq(4).all()


@pytest.mark.parametrize(
    ("basename", "sentence"),
    [
        ("127.0.0.1:5000", "give --num_actors, the number of servers from there on"),
        ("somewhere", "An address is unix:/path or host:port"),
        ("192.0.2.1:5000", "give --num_actors"),
    ],
)
def test_servers_that_cannot_be_dialled_are_one_sentence(basename, sentence):
    with pytest.raises(UsageError, match=sentence):
        polybeast_learner.Flags(env="Catch", pipes_basename=basename).validate()


@pytest.mark.parametrize(("num_envs", "is_told"), [(48, False), (520, True)])
def test_rollouts_that_will_be_old_are_told(caplog, num_envs, is_told):
    source = argparse.Namespace(num_envs=num_envs)
    polybeast_learner.warn_of_lag(polybeast_learner.Flags(batch_size=8), source)
    assert ("rollouts are 65 updates old" in caplog.text) == is_told
