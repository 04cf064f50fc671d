"""An agent as people wrote them for TorchBeast: its names, its loops, nothing of our own.

Dict observations, an LSTM, agent outputs beyond the usual three; environments of old Gym's kind in
forked processes.

    python -m tests.helpers.torchbeast_agent --basename unix:/some/path --savedir DIR
"""

import argparse
import collections
import multiprocessing as mp
import sys
import threading
import time

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import libtorchbeast
import nest
from torchbeast.core import file_writer, prof, vtrace

parser = argparse.ArgumentParser()
parser.add_argument("--basename", default="unix:/tmp/recall")
parser.add_argument("--savedir", required=True)
parser.add_argument("--xpid", default="recall")
parser.add_argument("--num_servers", type=int, default=4)
parser.add_argument("--num_actors", type=int, default=8)
parser.add_argument("--num_inference_threads", type=int, default=1)
parser.add_argument("--num_learner_threads", type=int, default=2)
parser.add_argument("--unroll_length", type=int, default=10)
parser.add_argument("--batch_size", type=int, default=8)
parser.add_argument("--total_steps", type=int, default=60_000)
parser.add_argument("--learning_rate", type=float, default=0.01)
parser.add_argument("--entropy_cost", type=float, default=0.01)
parser.add_argument("--baseline_cost", type=float, default=0.5)
parser.add_argument("--discounting", type=float, default=0.95)
parser.add_argument("--target", type=float, default=0.9, help="stop at this mean return")

EnvOutput = collections.namedtuple("EnvOutput", "obs reward done episode_step episode_return")
AgentOutput = collections.namedtuple("AgentOutput", "action policy_logits baseline extras")


class Recall:
    """A digit is shown once; two steps later it must be named. Without memory: mean return 0."""

    NUM_DIGITS, DELAY = 2, 2

    def __init__(self):
        self.rng = np.random.RandomState()

    def reset(self):
        self.digit = self.rng.randint(self.NUM_DIGITS)
        self.time = 0
        return self.observe()

    def step(self, action):
        done = self.time == self.DELAY
        reward = 0.0
        if done:
            reward = 1.0 if action == self.digit else -1.0
        self.time += 1
        return self.observe(), reward, done, {}

    def observe(self):
        digit = np.zeros(self.NUM_DIGITS, np.float32)
        if self.time == 0:
            digit[self.digit] = 1.0
        # A picture that is the transpose of another one: not contiguous, as many are.
        picture = np.tile(digit, (3, 1)).T
        stats = (np.array([self.time], np.int64), np.array(self.time == self.DELAY))
        return {"picture": picture, "blstats": stats}


class Net(nn.Module):
    def __init__(self, num_actions=Recall.NUM_DIGITS, hidden_size=32):
        super().__init__()
        self.hidden_size = hidden_size
        self.picture = nn.Linear(3 * Recall.NUM_DIGITS, hidden_size)
        self.time = nn.Embedding(Recall.DELAY + 2, hidden_size)
        self.core = nn.LSTM(hidden_size + 1, hidden_size)
        self.policy = nn.Linear(hidden_size, num_actions)
        self.baseline = nn.Linear(hidden_size, 1)

    def initial_state(self, batch_size=1):
        return tuple(torch.zeros(1, batch_size, self.hidden_size) for _ in range(2))

    def forward(self, env_output, core_state):
        obs = env_output.obs
        time, asked = obs["blstats"]
        T, B = env_output.done.shape
        x = self.picture(obs["picture"].flatten(2)) + self.time(time.squeeze(-1))
        x = torch.cat([F.relu(x), asked.unsqueeze(-1).float()], dim=-1)
        core_outputs = []
        for row, notdone in zip(x.unbind(), (~env_output.done).float().unbind(), strict=True):
            core_state = nest.map(notdone.view(1, -1, 1).mul, core_state)
            output, core_state = self.core(row.unsqueeze(0), core_state)
            core_outputs.append(output)
        core_output = torch.cat(core_outputs)

        policy_logits = self.policy(core_output)
        baseline = self.baseline(core_output).squeeze(-1)
        probabilities = F.softmax(policy_logits, dim=-1).flatten(0, 1)
        action = torch.multinomial(probabilities, num_samples=1).view(T, B)
        extras = {"core_output": core_output, "time": time.squeeze(-1)}
        return AgentOutput(action, policy_logits, baseline, extras), core_state


def serve(address):
    server = libtorchbeast.Server(lambda: Recall(), server_address=address)
    server.run()


def inference(inference_batcher, model):
    with torch.no_grad():
        for batch in inference_batcher:
            env_outputs, agent_state = batch.get_inputs()
            outputs = model(EnvOutput(*env_outputs), agent_state)
            batch.set_outputs(nest.map(lambda t: t, (tuple(outputs[0]), outputs[1])))


def compute_losses(flags, batch, initial_agent_state, model):
    env_outputs, actor_outputs = EnvOutput(*batch[0]), AgentOutput(*batch[1])
    learner_outputs, _ = model(env_outputs, initial_agent_state)
    # What the agent said beside its action arrived with it: at row t, about row t - 1.
    assert torch.equal(actor_outputs.extras["time"][1:], env_outputs.obs["blstats"][0][:-1, :, 0])

    # Row t of the actor's outputs led to row t of the environment's.
    bootstrap_value = learner_outputs.baseline[-1]
    env_outputs = nest.map(lambda t: t[1:], tuple(env_outputs))
    actor_outputs = AgentOutput(*nest.map(lambda t: t[1:], tuple(actor_outputs)))
    learner_outputs = AgentOutput(*nest.map(lambda t: t[:-1], tuple(learner_outputs)))
    env_outputs = EnvOutput(*env_outputs)

    vtrace_returns = vtrace.from_logits(
        behavior_policy_logits=actor_outputs.policy_logits,
        target_policy_logits=learner_outputs.policy_logits,
        actions=actor_outputs.action,
        discounts=(~env_outputs.done).float() * flags.discounting,
        rewards=torch.clamp(env_outputs.reward, -1, 1),
        values=learner_outputs.baseline,
        bootstrap_value=bootstrap_value,
    )
    cross_entropy = F.nll_loss(
        F.log_softmax(learner_outputs.policy_logits.flatten(0, 1), dim=-1),
        target=actor_outputs.action.flatten(0, 1),
        reduction="none",
    ).view_as(vtrace_returns.pg_advantages)
    pg_loss = torch.sum(cross_entropy * vtrace_returns.pg_advantages.detach())
    baseline_loss = 0.5 * torch.sum((vtrace_returns.vs - learner_outputs.baseline) ** 2)
    log_policy = F.log_softmax(learner_outputs.policy_logits, dim=-1)
    entropy_loss = torch.sum(log_policy.exp() * log_policy)
    loss = pg_loss + flags.baseline_cost * baseline_loss + flags.entropy_cost * entropy_loss
    return loss, env_outputs


def check_first_batch(batch, initial_agent_state, model):
    """Before the first update the learner must recompute precisely what the actors computed."""
    env_outputs, actor_outputs = EnvOutput(*batch[0]), AgentOutput(*batch[1])
    with torch.no_grad():
        learner_outputs, _ = model(env_outputs, initial_agent_state)
    for name in ("policy_logits", "baseline"):
        ours, theirs = getattr(learner_outputs, name)[:-1], getattr(actor_outputs, name)[1:]
        assert torch.allclose(ours, theirs, atol=1e-5), name


def learn(flags, learner_queue, model, actor_model, optimizer, stats, plogger, lock):
    timings = prof.Timings()
    for tensors in learner_queue:
        timings.time("dequeue")
        batch, initial_agent_state = tensors
        with lock:
            if stats["step"] == 0:
                check_first_batch(batch, initial_agent_state, model)
            loss, env_outputs = compute_losses(flags, batch, initial_agent_state, model)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 40.0)
            optimizer.step()
            actor_model.load_state_dict(model.state_dict())
            timings.time("learn")
            stats["returns"].extend(env_outputs.episode_return[env_outputs.done].tolist())
            lengths = env_outputs.episode_step[env_outputs.done]
            assert torch.all(lengths == Recall.DELAY + 1), lengths
            stats["step"] += flags.unroll_length * flags.batch_size
            mean = sum(stats["returns"]) / max(1, len(stats["returns"]))
            stats["mean_episode_return"] = mean
            plogger.log({"step": stats["step"], "loss": loss.item(), "mean_episode_return": mean})
        timings.reset()
    stats["timings"] = timings.summary()


def train(flags):
    addresses = [f"{flags.basename}.{i}" for i in range(flags.num_servers)]
    servers = [mp.get_context("fork").Process(target=serve, args=(address,), daemon=True)
               for address in addresses]  # fmt: skip
    for server in servers:
        server.start()

    plogger = file_writer.FileWriter(
        xpid=flags.xpid, xp_args=flags.__dict__, rootdir=flags.savedir, symlink_to_latest=True
    )
    learner_queue = libtorchbeast.BatchingQueue(
        batch_dim=1,
        minimum_batch_size=flags.batch_size,
        maximum_batch_size=flags.batch_size,
        check_inputs=True,
        maximum_queue_size=flags.batch_size,
    )
    inference_batcher = libtorchbeast.DynamicBatcher(
        batch_dim=1,
        minimum_batch_size=1,
        maximum_batch_size=512,
        timeout_ms=100,
        check_outputs=True,
    )
    model, actor_model = Net(), Net()
    actor_model.load_state_dict(model.state_dict())
    actors = libtorchbeast.ActorPool(
        unroll_length=flags.unroll_length,
        learner_queue=learner_queue,
        inference_batcher=inference_batcher,
        env_server_addresses=[addresses[i % flags.num_servers] for i in range(flags.num_actors)],
        initial_agent_state=model.initial_state(),
    )
    actorpool_thread = threading.Thread(target=actors.run, name="actorpool-thread")

    optimizer = torch.optim.RMSprop(
        model.parameters(), lr=flags.learning_rate, eps=0.01, alpha=0.99
    )
    stats = {"step": 0, "returns": collections.deque(maxlen=200), "mean_episode_return": -1.0}
    lock = threading.Lock()
    threads = [
        threading.Thread(target=learn, name=f"learner-thread-{i}", args=(
            flags, learner_queue, model, actor_model, optimizer, stats, plogger, lock))
        for i in range(flags.num_learner_threads)
    ] + [
        threading.Thread(target=inference, name=f"inference-thread-{i}", args=(
            inference_batcher, actor_model))
        for i in range(flags.num_inference_threads)
    ]  # fmt: skip
    actorpool_thread.start()
    for thread in threads:
        thread.start()

    def is_learnt():
        return len(stats["returns"]) == 200 and stats["mean_episode_return"] >= flags.target

    while stats["step"] < flags.total_steps and not is_learnt():
        time.sleep(0.1)
        if not all(thread.is_alive() for thread in [actorpool_thread, *threads]):
            break

    inference_batcher.close()
    learner_queue.close()
    actorpool_thread.join(60)
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in [actorpool_thread, *threads])
    for server in servers:
        server.terminate()
        server.join(60)
    assert all(server.exitcode is not None for server in servers)
    plogger.close()
    print(stats.get("timings"))
    print(f"{actors.count()} steps, {stats['step']} learnt from, "
          f"mean return {stats['mean_episode_return']:.3f}")  # fmt: skip
    return 0 if is_learnt() else 1


if __name__ == "__main__":
    sys.exit(train(parser.parse_args()))
