"""The names that code written for TorchBeast knows, with its shapes, and the agent's weights."""

import argparse
import itertools
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import libtorchbeast
from libtorchbeast.rows import Spec
from libtorchbeast.specs import ArraySpec
from torchbeast import polybeast, polybeast_learner
from torchbeast.core.learner import Learner
from torchbeast.errors import UsageError
from torchbeast.models import Agent
from torchbeast.polybeast_learner import Net
from torchbeast.runtime.inference_model import ActorModel

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


# --- Our own rows, and those of code for TorchBeast -------------------------------------------


class FakeBatch:
    """What a batcher hands out."""

    def __init__(self, row, agent_state=()):
        self._inputs = row, agent_state
        self.outputs = self.error = None

    def get_inputs(self):
        return self._inputs

    def set_outputs(self, outputs):
        self.outputs = outputs

    def set_exception(self, error):
        self.error = error


def named(rows):
    """Rows of TorchBeast's as our own."""
    row = dict(zip(("frame", "reward", "done", "episode_step", "episode_return"), rows))  # noqa: B905
    row["truncated"] = torch.zeros_like(row["done"])
    row["last_action"] = torch.randint(A, row["done"].shape)
    return row


def with_done_as(rows, dtype):
    return tuple(leaf.to(dtype) if leaf.dtype == torch.bool else leaf for leaf in rows)


def test_our_rows_are_answered_with_a_dict_that_has_the_version():
    agent = Agent((4, 84, 84), A, use_lstm=True)
    actor_model = ActorModel(agent, torch.device("cpu"), version=7)
    batch = FakeBatch(named(env_outputs(1, B)), agent.initial_state(B))
    polybeast_learner.inference(FLAGS, [batch], actor_model)
    output, state = batch.outputs
    shapes = {name: tuple(leaf.shape) for name, leaf in output.items()}
    assert shapes == {
        "action": (1, B),
        "policy_logits": (1, B, A),
        "baseline": (1, B),
        "version": (1, B),
    }
    assert output["version"].dtype == torch.int64
    assert output["version"].eq(7).all()
    assert [tuple(part.shape) for part in state] == [(1, B, 256)] * 2


def test_a_model_that_answers_with_a_tuple_answers_our_rows_with_a_dict():
    batch = FakeBatch(named(env_outputs(1, B)))
    polybeast_learner.inference(FLAGS, [batch], Net(A))
    output, _ = batch.outputs
    assert set(output) == {"action", "policy_logits", "baseline", "version"}


def test_rows_of_torchbeast_are_answered_with_its_tuple():
    class Ours(Net):
        def forward(self, inputs, core_state=()):
            (action, logits, baseline), core_state = super().forward(inputs, core_state)
            return {"baseline": baseline, "action": action, "policy_logits": logits}, core_state

    for model in (Net(A), Ours(A)):
        batch = FakeBatch(env_outputs(1, B))
        polybeast_learner.inference(FLAGS, [batch], model)
        (action, logits, baseline), _ = batch.outputs
        assert action.shape == baseline.shape == (1, B)
        assert logits.shape == (1, B, A)


def test_what_an_agent_adds_to_its_tuple_reaches_code_for_torchbeast():
    class Talkative(Net):
        def forward(self, inputs, core_state=()):
            output, core_state = super().forward(inputs, core_state)
            return (*output, output[2] + 1), core_state

    batch = FakeBatch(env_outputs(1, B))
    polybeast_learner.inference(FLAGS, [batch], Talkative(A))
    (_, _, baseline, extra), _ = batch.outputs
    assert torch.equal(extra, baseline + 1)


def learn_from(batches, use_lstm=False, seed=0):
    """The model after `learn`, and what it said about it."""
    torch.manual_seed(seed)
    model, actor_model = Net(A, use_lstm), Net(A, use_lstm)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.001)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)
    stats = {}
    args = (FLAGS, batches, model, actor_model, optimizer, scheduler, stats)
    polybeast_learner.learn(*args)
    return model, stats


def assert_same_weights(ours, theirs):
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_done_may_be_bytes(dtype):
    torch.manual_seed(1)
    (rows, outputs), state = rollouts(use_lstm=True)
    other = with_done_as(rows, dtype)
    expected, stats = learn_from([((rows, outputs), state)], use_lstm=True)
    model, their_stats = learn_from([((other, outputs), state)], use_lstm=True)
    assert_same_weights(model, expected)
    assert their_stats == stats

    torch.manual_seed(2)
    row, state = with_done_as(env_outputs(2, B), dtype), Net(A, True).initial_state(B)
    state = tuple(part + 1.0 for part in state)
    row = tuple(leaf[1:] for leaf in row)  # the first environment begins an episode
    batch = FakeBatch(row, state)
    polybeast_learner.inference(FLAGS, [batch], model)
    _, after = batch.outputs
    _, expected_after = model(dict(zip(("frame", "reward", "done"), row)), state)  # noqa: B905
    torch.testing.assert_close(after, expected_after)
    assert not torch.equal(after[0][:, 0], after[0][:, 1])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int16, torch.float32])
def test_actions_may_be_numbers_of_any_kind(dtype):
    torch.manual_seed(1)
    (rows, outputs), state = rollouts(use_lstm=False)
    action, logits, baseline = outputs
    expected, _ = learn_from([((rows, outputs), state)])
    model, _ = learn_from([((rows, (action.to(dtype), logits, baseline)), state)])
    assert_same_weights(model, expected)


def test_rows_by_name_and_by_position_teach_the_same():
    torch.manual_seed(1)
    (rows, outputs), state = rollouts(use_lstm=False)
    by_name = dict(zip(("action", "policy_logits", "baseline"), outputs, strict=True))
    by_name["version"] = torch.zeros(T + 1, B, dtype=torch.int64)
    expected, _ = learn_from([((rows, outputs), state)])
    model, stats = learn_from([((named(rows), by_name), state)])
    assert_same_weights(model, expected)
    assert stats["policy_lag"] == 0


def test_truncated_rows_and_versions_of_our_own_rows_reach_the_learner():
    (rows, outputs), state = rollouts(use_lstm=False)
    rows = named(rows)
    rows["truncated"][2:, 1] = True
    by_name = dict(zip(("action", "policy_logits", "baseline"), outputs, strict=True))
    by_name["version"] = torch.zeros(T + 1, B, dtype=torch.int64)
    batches = [((rows, by_name), state) for _ in range(3)]
    _, stats = learn_from(batches)
    assert stats["step"] == 3 * (T * B - (T - 1))
    assert stats["policy_lag"] == 2  # of the last update


def test_states_of_any_dtype_pass_through_inference():
    class Counting(Net):
        def forward(self, inputs, core_state=()):
            output, _ = super().forward(inputs)
            return output, tuple(part + 1 for part in core_state)

    dtypes = (torch.int64, torch.float64, torch.float16, torch.uint8)
    state = tuple(torch.zeros(1, B, 2, dtype=dtype) for dtype in dtypes)
    batch = FakeBatch(env_outputs(1, B), state)
    polybeast_learner.inference(FLAGS, [batch], Counting(A))
    _, after = batch.outputs
    assert [part.dtype for part in after] == list(dtypes)
    assert all(part.eq(1).all() for part in after)


def test_each_gpu_has_made_the_weights_before_threads_read_them(monkeypatch):
    waited_for = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited_for.append)
    devices = [torch.device(name) for name in ("cuda:1", "cpu", "cuda:0")]
    polybeast_learner.synchronize(*devices)
    assert waited_for == [devices[0], devices[2]]


def test_the_wait_for_gpus_is_after_the_last_copy_and_before_the_first_thread(
    monkeypatch, tmp_path
):
    """Threads have streams of their own, which do not wait for copies on another one."""
    events = []
    devices = {"learner": torch.device("cuda:1"), "actor": torch.device("cuda:0")}

    class Started(Exception):
        pass

    def start(*_):
        events.append("threads")
        raise Started

    monkeypatch.setattr(torch.cuda, "synchronize", events.append)
    monkeypatch.setattr(polybeast_learner, "Threads", start)
    monkeypatch.setattr(polybeast_learner, "ActorModel", lambda *_, **__: events.append("copies"))
    monkeypatch.setattr(polybeast.Flags, "find_device", lambda self, name: devices["actor"])
    learner = SimpleNamespace(
        model=Agent((7,), A, encoder="mlp"),
        device=devices["learner"],
        version=0,
        finished=threading.Event(),
        rounds=SimpleNamespace(),
        stats=None,
    )
    source = SimpleNamespace(num_envs=2, clients=list, spec=Spec(ArraySpec("float32", (7,))))
    flags = polybeast.Flags(env="Catch", savedir=tmp_path, xpid="run")
    with pytest.raises(Started):
        polybeast_learner.act_and_learn(flags, learner, source, run=None)
    assert events == ["copies", devices["learner"], devices["actor"], "threads"]


def test_flags_may_be_any_object_that_has_some_of_them():
    class Flags:
        __slots__ = ("discounting", "learner_device")  # vars() does not work

    flags = Flags()
    flags.discounting, flags.learner_device = 0.5, "cpu"
    settings = polybeast_learner._settings_of(flags)
    assert settings.discounting == 0.5
    assert settings.vtrace_lambda == 1.0  # as in TorchBeast
    ours = polybeast_learner.Flags(env="Catch", discounting=0.7)
    assert polybeast_learner._settings_of(ours) is ours


# --- `learn` is what `train` runs -------------------------------------------------------------


def catch(tmp_path, **changes):
    return polybeast.Flags(
        env="Catch",
        model="mlp",
        savedir=tmp_path,
        xpid="run",
        num_servers=1,
        envs_per_actor=4,
        batch_size=4,
        **{"total_steps": 2000, **changes},
    )


def weights_of(tmp_path):
    path = tmp_path / "run" / "model.tar"
    return torch.load(path, weights_only=True)["model_state_dict"]


def test_an_edit_of_learn_changes_the_training(tmp_path, monkeypatch):
    def forked(
        flags, learner_queue, model, actor_model, optimizer, scheduler, stats,
        plogger=None, lock=None, *, learner,
    ):  # fmt: skip
        for _ in itertools.islice(learner_queue, 3):
            with learner.lock, torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(0.25)
        learner.finished.set()

    monkeypatch.setattr(polybeast_learner, "learn", forked)
    assert polybeast.train(catch(tmp_path)) == 0
    assert all(tensor.eq(0.25).all() for tensor in weights_of(tmp_path).values())


def test_what_learn_is_given_by_train_is_what_it_learns_with(tmp_path, monkeypatch):
    calls = []
    learn = polybeast_learner.learn

    def spy(flags, learner_queue, model, actor_model, optimizer, scheduler, stats, **others):
        calls.append((model, optimizer, scheduler, stats, others["learner"]))
        learn(flags, learner_queue, model, actor_model, optimizer, scheduler, stats, **others)

    monkeypatch.setattr(polybeast_learner, "learn", spy)
    assert polybeast.train(catch(tmp_path, num_learner_threads=2)) == 0
    assert len(calls) == 2
    for model, optimizer, scheduler, stats, learner in calls:
        assert isinstance(learner, Learner)
        assert model is learner.model
        assert optimizer is learner.optimizer
        assert scheduler is learner.scheduler
        assert stats["step"] <= learner.stats.step
    saved = weights_of(tmp_path)
    assert all(torch.equal(saved[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_model_that_raises_in_inference_raises_for_those_who_wait():
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
        ("127.0.0.1:5000", "give --num_servers, the number of ports from there on"),
        ("somewhere", "An address is unix:/path or host:port"),
        ("192.0.2.1:5000", "give --num_servers"),
    ],
)
def test_servers_that_cannot_be_dialled_are_one_sentence(basename, sentence):
    with pytest.raises(UsageError, match=sentence):
        polybeast_learner.Flags(env="Catch", pipes_basename=basename).validate()
