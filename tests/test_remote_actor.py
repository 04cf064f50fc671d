"""Actors that carry the model: what they send is what the learner would compute."""

import dataclasses
import os
import signal
import threading

import grpc
import numpy as np
import pytest

from libtorchbeast.rpc import env_pb2 as pb
from libtorchbeast.rpc.actor_messages import (
    decode_welcome,
    encode_actor_hello,
    encode_request,
    encode_welcome,
)
from libtorchbeast.rpc.handshake import Greeting, Hello
from libtorchbeast.rpc.limits import Limits
from libtorchbeast.rpc.messages import ACTOR_METHOD
from libtorchbeast.rpc.rollout_messages import encode_rollout
from libtorchbeast.rpc.security import Security
from tests.helpers.actors import UNROLL_LENGTH, Publisher, acting, make_group, recompute
from tests.helpers.certificates import write_secret
from tests.helpers.counting import Fragile, counting_group
from tests.helpers.remote import learner
from tests.helpers.threads import run_in_threads, wait_until
from tests.test_rpc_bad_peers import talk
from torchbeast.errors import UsageError
from torchbeast.run.remote_actor import RolloutMemory, build_copy

NUM_ENVS = 2


def by_environment(rollouts):
    columns = {}
    for rollout in rollouts:
        columns.setdefault(int(rollout[0]["source"][0, 0]), []).append(rollout)
    return columns


def wait_for_version(it, version):
    wait_until(lambda: any(r[1]["version"][1, 0] == version for r in it.rollouts[-8:]))


# --------------------------------------------------------------------------- what is learnt from


def test_rollouts_are_what_the_learner_computes_with_the_same_weights():
    publisher = Publisher(use_lstm=True)
    with publisher.learning() as it, acting(it.address, NUM_ENVS):
        it.wait_for_rollouts(8)
        publisher.publish(1)
        wait_for_version(it, 1)
        publisher.publish(4)
        wait_for_version(it, 4)
        it.wait_for_rollouts(4)
    assert {int(r[1]["version"][1, 0]) for r in it.rollouts} == {0, 1, 4}
    columns = by_environment(it.rollouts)
    assert len(columns) == NUM_ENVS
    for rollouts in columns.values():
        state = [np.zeros_like(part) for part in rollouts[0][2]]
        assert rollouts[0][0]["done"][0].all()
        for i, rollout in enumerate(rollouts):
            rows, outputs, rollout_state = rollout
            if i > 0:
                last = rollouts[i - 1][0]
                for name in ("frame", "reward", "done", "last_action", "episode_step"):
                    np.testing.assert_array_equal(rows[name][0], last[name][-1], name)
            np.testing.assert_array_equal(rows["last_action"][1:], outputs["action"][1:])
            version = outputs["version"][1:]
            assert (version == version[0]).all(), "one version acts in a rollout"
            for ours, theirs in zip(state, rollout_state, strict=True):
                np.testing.assert_allclose(ours, theirs, atol=1e-5)
            logits, state = recompute(publisher.models[int(version[0, 0])], rollout)
            np.testing.assert_allclose(logits, outputs["policy_logits"][1:], atol=1e-5)
        ends = sum(int(r[0]["done"][1:].sum()) for r in rollouts)
        assert ends > 0, "memory was zeroed at the end of an episode, at the right row"


def test_bfloat16_at_the_actor_gives_other_logits_and_the_same_rows():
    publisher = Publisher()
    with (
        publisher.learning() as it,
        acting(it.address, NUM_ENVS, autocast=True, weights_dtype="bfloat16"),
    ):
        it.wait_for_rollouts(4)
    exact = [recompute(publisher.models[0], r)[0] - r[1]["policy_logits"][1:] for r in it.rollouts]
    difference = np.abs(np.concatenate(exact)).max()
    assert 0 < difference < 0.1, "the log-probabilities that are corrected for are the actor's"


def test_with_a_learner_that_is_waited_for_there_is_no_lag():
    """Each rollout is played with weights at least as new as when the one before was taken."""
    publisher = Publisher(queue_size=0)
    assert publisher.offers.in_flight == 1
    with publisher.learning() as it, acting(it.address, NUM_ENVS) as (link, _):
        for version in range(1, 6):
            publisher.publish(version)
            wait_for_version(it, version)
        session = link.next_session(lambda: None)
        assert session.welcome.rollouts_ahead == 0
        assert session.num_untaken <= 1


def test_while_an_actor_plays_the_learner_knows_that_rollouts_are_on_their_way():
    publisher = Publisher()
    with publisher.learning() as it:
        assert not it.pool.brings_rollouts
        with acting(it.address, NUM_ENVS) as (link, _):
            it.wait_for_rollouts(2)
            assert it.pool.brings_rollouts
            welcome = link.next_session(lambda: None).welcome
            assert publisher.offers.in_flight == welcome.rollouts_ahead + 2
        wait_until(lambda: not it.pool.brings_rollouts)


def test_updates_without_end_keep_no_actor_from_playing_though_it_waits_for_weights():
    """Others may be nearer to the learner: it is past each version that comes."""
    publisher = Publisher(queue_size=0)
    over = threading.Event()

    def publish_all_the_time():
        version = 0
        while not over.wait(0.002):
            version += 1
            publisher.offers.publish(publisher.learner.model, version)

    with publisher.learning() as it, run_in_threads(publish_all_the_time):
        with acting(it.address, NUM_ENVS):
            it.wait_for_rollouts(20)
        over.set()
    versions = [int(r[1]["version"][1, 0]) for r in it.rollouts]
    assert versions == sorted(versions)
    assert len(set(versions)) > 2


def test_rollouts_with_old_weights_are_not_sent_but_counted_and_said(caplog):
    publisher = Publisher(max_policy_lag=3)
    num_steps = 0
    link_of = []

    def beat():
        nonlocal num_steps
        num_steps += 1
        if num_steps == 2 * UNROLL_LENGTH + 3:  # in the middle of the third rollout
            publisher.publish(100)
            session = link_of[0].next_session(lambda: None)
            wait_until(lambda: session.newest == 100)

    start = threading.Event()
    with publisher.learning() as it:
        with acting(it.address, NUM_ENVS, beat=lambda: start.wait(60) and beat()) as (link, actor):
            link_of.append(link)
            start.set()
            wait_for_version(it, 100)
            wait_until(lambda: [f.unsent for f in it.gateways.clients] == [NUM_ENVS])
        assert actor.num_unsent == NUM_ENVS
    text = "Rollouts are too old and are not sent; see --max_policy_lag (3): the learner is at "
    assert f"{text}version 100, they were played with version 0." in caplog.text
    assert len(by_environment(it.rollouts)) == NUM_ENVS


def test_an_environment_that_raises_is_rebuilt_and_its_row_is_truncated():
    publisher = Publisher(env="tests.helpers.counting:Fragile")
    with publisher.learning() as it, acting(it.address, group=counting_group(1, Fragile)):
        wait_until(lambda: any(r[0]["truncated"][1:].any() for r in it.rollouts))
    rows = next(r[0] for r in it.rollouts if r[0]["truncated"][1:].any())
    assert (rows["done"] | ~rows["truncated"]).all()


def test_after_a_lost_stream_the_open_rollout_is_dropped_and_episodes_go_on():
    publisher = Publisher()
    with publisher.learning() as it, acting(it.address, 1) as (link, _):
        it.wait_for_rollouts(2)
        session = link.next_session(lambda: None)  # once it is killed, this would be the next one
        for pid in it.gateways.pids:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: session.is_over)
        num_before = len(it.rollouts)
        it.wait_for_rollouts(3)
    again = [r[0] for r in it.rollouts[num_before - 1 :]]
    first = next(rows for rows in again if rows["done"][0].all() and rows["episode_step"][0] == 0)
    assert not first["truncated"][0].any()
    for rows, _, _ in it.rollouts:
        assert len(rows["done"]) == UNROLL_LENGTH + 1, "nothing is half-written"


# ---------------------------------------------------------------------------------- what is refused


def actor_hello(publisher, num_envs=NUM_ENVS):
    return encode_actor_hello(Hello("bad", num_envs, publisher.spec, has_model=True), "float32")


def some_rollout(welcome, change=None, **values):
    memory = RolloutMemory(welcome, NUM_ENVS)
    memory.rows["done"][0] = True
    if change is not None:
        change(memory)
    state = tuple(np.zeros((p.shape[0], NUM_ENVS, *p.shape[1:]), p.dtype) for p in welcome.state)
    return encode_rollout(memory.rows, memory.output, state, **{"version": 0, **values})


def put(*path, at=..., value):
    def change(memory):
        part = getattr(memory, path[0])
        part[path[1]][at] = value

    return change


def changed(welcome, change):
    """A rollout whose message is changed after it was written."""
    message = pb.ActorMessage.FromString(some_rollout(welcome))
    change(message.rollout)
    return message.SerializeToString()


BAD = {
    "from 0 to 0, which is the newest, got 7": lambda w: some_rollout(w, version=7),
    "from 0 to 0, which is the newest, got -1": lambda w: some_rollout(w, version=-1),
    "An action must be from 0 to 2, got 3": lambda w: some_rollout(
        w, put("output", "action", at=(1, 1), value=3)
    ),
    "An action must be from 0 to 2, got -1": lambda w: some_rollout(
        w, put("rows", "last_action", at=(1, 0), value=-1)
    ),
    "policy_logits must be from -1e+09 to 1e+09": lambda w: some_rollout(
        w, put("output", "policy_logits", at=(2, 0, 1), value=np.nan)
    ),
    "baseline must be from": lambda w: some_rollout(
        w, put("output", "baseline", at=(0, 0), value=np.inf)
    ),
    "reward must be from -1e+09 to 1e+09": lambda w: some_rollout(
        w, put("rows", "reward", at=(3, 1), value=2e9)
    ),
    "Observation 0 must be from": lambda w: some_rollout(
        w, put("rows", "frame", at=(3, 1), value=np.inf)
    ),
    "every done must be true": lambda w: some_rollout(w, put("rows", "done", value=False)),
    "A truncated environment must be done": lambda w: some_rollout(
        w, put("rows", "truncated", at=2, value=True)
    ),
    "episode_step must not be negative": lambda w: some_rollout(
        w, put("rows", "episode_step", at=(1, 0), value=-4)
    ),
    "done is bool: every byte must be 0 or 1": lambda w: changed(
        w, lambda r: setattr(r, "done", b"\2" * len(r.done))
    ),
    "policy_logits must have 144 bytes": lambda w: changed(
        w, lambda r: setattr(r, "policy_logits", b"")
    ),
    "must have 1 of observation, got 2": lambda w: changed(w, lambda r: r.observation.append(b"")),
    "must have 1 of stacked, got 2": lambda w: changed(w, lambda r: r.stacked.append(b"")),
    "stacked 0 is bool": lambda w: changed(
        w, lambda r: r.stacked.__setitem__(0, b"\7" * UNROLL_LENGTH * NUM_ENVS)
    ),
    "Observation 0 must have": lambda w: changed(
        w, lambda r: r.stacked.__setitem__(0, b"\1" * UNROLL_LENGTH * NUM_ENVS)
    ),
    "must have 0 of state, got 1": lambda w: changed(w, lambda r: r.state.append(b"1234")),
    "An info's count must be from 1 to 12": lambda w: some_rollout(w, info={"a": (1.0, 13)}),
    "Expected a message of env.proto, got 7 other bytes": lambda w: b"\x1a\x05\xff\xff\xff\xff\xff",
    "got an empty message": lambda w: b"",
    "fields here, got more": lambda w: changed(w, lambda r: r.state.extend([b""] * 1000)),
    "may have": lambda w: changed(w, lambda r: setattr(r, "baseline", bytes(1 << 20))),
}


def test_what_breaks_a_rule_is_refused_with_a_sentence_and_the_learner_goes_on():
    publisher = Publisher()
    welcomes = []
    with publisher.learning() as it:

        def answers(message):
            yield actor_hello(publisher)
            yield message

        # The first stream: what a learner says, and that a good rollout is taken.
        with grpc.insecure_channel(it.address) as channel:
            call = channel.stream_stream("/" + "/".join(ACTOR_METHOD))(
                iter([actor_hello(publisher)]), timeout=60
            )
            spec = Hello("test", NUM_ENVS, publisher.spec)
            welcomes.append(decode_welcome(next(call), spec))
        welcome = welcomes[0]
        good = some_rollout(welcome)
        assert talk(it.address, answers(good), ACTOR_METHOD)[1:] == ("OK", "")
        for sentence, make in BAD.items():
            num_answers, code, text = talk(it.address, answers(make(welcome)), ACTOR_METHOD)
            assert (num_answers, code) == (1, "INVALID_ARGUMENT"), (sentence, text)
            assert sentence in text
        wait_until(lambda: [f.refused for f in it.gateways.clients] == [len(BAD)])
        num_rollouts = len(it.rollouts)
        assert num_rollouts == NUM_ENVS, "only the good one came through"
        with acting(it.address, NUM_ENVS):
            it.wait_for_rollouts(4)


def test_a_request_too_many_is_refused():
    publisher = Publisher()
    with publisher.learning() as it:
        # Nothing newer than version 0 comes: the first is not answered, the second is too many.
        with grpc.insecure_channel(it.address) as channel:
            requests = iter([actor_hello(publisher), encode_request(0), encode_request(0)])
            call = channel.stream_stream("/" + "/".join(ACTOR_METHOD))(requests, timeout=60)
            with pytest.raises(grpc.RpcError) as error:
                list(call)
        assert error.value.details() == "One request for weights at a time, got another one."


def test_who_does_not_read_its_weights_holds_nobody_up():
    publisher = Publisher(env="Mock")  # whose weights fit into nobody's buffers
    with publisher.learning() as it, grpc.insecure_channel(it.address) as channel:
        over = threading.Event()

        def requests():
            yield actor_hello(publisher)
            yield encode_request(-1)
            over.wait(60)

        call = channel.stream_stream("/" + "/".join(ACTOR_METHOD))(requests(), timeout=60)
        next(call)
        with acting(it.address, group=make_group(1, "Mock")):
            it.wait_for_rollouts(4)
            publisher.publish(1)
            wait_for_version(it, 1)
        over.set()
        call.cancel()


def test_an_actor_without_the_token_gets_nothing_done(tmp_path):
    publisher = Publisher()
    security = Security(token_file=write_secret(tmp_path / "token", "secret"))
    with publisher.learning(security=security) as it:
        _, code, text = talk(it.address, [actor_hello(publisher)], ACTOR_METHOD)
        assert code == "UNAUTHENTICATED"
        assert "The token must be this end's, got none" in text
        assert it.gateways.num_lanes == 0
        answers = talk(it.address, [actor_hello(publisher)], ACTOR_METHOD, token="secret")
        assert answers == (1, "OK", "")


def test_a_learner_of_environments_alone_takes_no_actors():
    with learner(listen=["127.0.0.1:0"]) as it:
        group = counting_group(1)
        hello = encode_actor_hello(Hello("actor", 1, group.spec, has_model=True), "float32")
        group.close()
        num_answers, code, text = talk(it.address, [hello], ACTOR_METHOD)
    assert (num_answers, code) == (0, "FAILED_PRECONDITION")
    assert text == "This learner takes environments, and no actors that carry the model."


def test_too_many_environments_in_a_rollout_are_refused_with_the_remedy():
    publisher = Publisher()
    with publisher.learning(limits=Limits(max_message_bytes=10_000)) as it:
        hello = actor_hello(publisher, num_envs=40)
        _, code, text = talk(it.address, [hello], ACTOR_METHOD)
    assert code == "RESOURCE_EXHAUSTED"
    assert "A rollout may have 10000 bytes, 40 environments like these have" in text


# ------------------------------------------------------------------------------------ the model


def welcome_of(publisher):
    data = encode_welcome(publisher.offers.make(), Greeting("learner"), "float32")
    return decode_welcome(data, Hello("test", 1, publisher.spec))


def test_code_that_a_learner_names_does_not_run_unless_the_actor_names_it_too():
    name = "tests.helpers.agents:TupleAgent"
    welcome = welcome_of(Publisher(model=name))
    with pytest.raises(UsageError, match=f"give it --model {name} if that is what you want to run"):
        build_copy(welcome)
    with pytest.raises(UsageError, match=f"model is {name}, and this actor's --model mlp"):
        build_copy(welcome, "mlp")
    assert type(build_copy(welcome, name)).__name__ == "TupleAgent"


def test_an_actor_that_cannot_have_the_model_says_so_and_asks_again(caplog):
    publisher = Publisher(model="tests.helpers.agents:TupleAgent")
    with publisher.learning() as it, acting(it.address, 1):
        wait_until(lambda: "code that this actor was not started with" in caplog.text)
    assert f"The learner at {it.address} does not fit this actor" in caplog.text
    assert not it.rollouts


@pytest.mark.parametrize(
    ("env", "flags"),
    [
        ("Mock", {"normalize_images": True}),
        ("Catch", {"separate_nets": True}),
        ("Catch", {"use_lstm": True, "normalize_observations": True}),
    ],
    ids=str,
)
def test_an_actor_makes_the_model_that_the_learner_has(env, flags):
    publisher = Publisher(env, **flags)
    copy = build_copy(welcome_of(publisher))
    assert copy.state_dict().keys() == publisher.learner.model.state_dict().keys()


def test_models_of_another_shape_are_told_apart():
    welcome = welcome_of(Publisher())
    other = dataclasses.replace(welcome, tensors=welcome.tensors[1:])
    with pytest.raises(UsageError, match="has other tensors than this actor's"):
        build_copy(other)
    other = dataclasses.replace(welcome, state=welcome_of(Publisher(use_lstm=True)).state)
    with pytest.raises(UsageError, match="has a memory of"):
        build_copy(other)
