"""The scheduler of lanes: fair to all of them, and nobody's wait holds up the others."""

import socket
import threading
import time

import numpy as np
import pytest

from libtorchbeast.json_socket import JsonSocket
from libtorchbeast.lane_scheduler import LaneLink, LaneScheduler, next_message, pause
from libtorchbeast.rows import EpisodeCounter, Spec
from libtorchbeast.shared_lanes import AGENT, ENVIRONMENT, Lane, LaneClosed
from libtorchbeast.specs import ArraySpec

SPEC = Spec(ArraySpec("float32"))


def agent(lane, number, pause_s=0.0):
    """Answers so many rows, then closes the lane."""

    def answer():
        for _ in range(number):
            while lane.turn.wait_while(ENVIRONMENT, 10) != AGENT:
                if lane.turn.wait_while(lane.turn.state, 10) == AGENT:
                    break
            time.sleep(pause_s)
            lane.actions[...] = 7
            lane.turn.pass_on(AGENT, ENVIRONMENT)
        lane.turn.wait_while(ENVIRONMENT, 10)
        lane.close()

    thread = threading.Thread(target=answer)
    thread.start()
    return thread


async def play(lane, counts, name):
    counter, link = EpisodeCounter(1), LaneLink(lane)
    await link.attach()
    row = counter.first_row(np.zeros(1, np.float32))
    try:
        while True:
            actions = await link.show(row)
            assert actions.tolist() == [7]
            counts.append((name, time.monotonic()))
    except LaneClosed:
        pass


def run(lanes, pauses, numbers):
    counts, scheduler = [], LaneScheduler()
    for name, lane in enumerate(lanes):
        scheduler.add(play(lane, counts, name))
    threads = [agent(*each) for each in zip(lanes, numbers, pauses, strict=True)]
    scheduler.run()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    return counts


def test_all_lanes_get_their_turns():
    lanes = [Lane.create(SPEC, 1) for _ in range(3)]
    counts = run(lanes, [0.0] * 3, [50] * 3)
    assert sorted(name for name, _ in counts) == [0] * 50 + [1] * 50 + [2] * 50


@pytest.mark.slow
def test_a_lane_whose_agent_is_slow_does_not_hold_up_the_others():
    slow, fast = Lane.create(SPEC, 1), Lane.create(SPEC, 1)
    start = time.monotonic()
    counts = run([slow, fast], [1.0, 0.0], [3, 200])
    done_at = max(at for name, at in counts if name == 1) - start
    # Waiting a quarter of a second for each turn of the slow one would take a minute.
    assert len([name for name, _ in counts if name == 1]) == 200
    assert done_at < 20


def test_messages_and_moments_are_waited_for_together():
    ours, theirs = (JsonSocket(end) for end in socket.socketpair())
    events = []

    async def wait_for_message():
        events.append((await next_message(theirs, 10))["kind"])

    async def wait_for_nothing():
        with pytest.raises(TimeoutError):
            await next_message(ours, 0.05)
        events.append("nothing")

    async def wait_for_a_moment():
        await pause(0.2)
        events.append("moment")
        ours.send("message")

    scheduler = LaneScheduler()
    for coroutine in (wait_for_message(), wait_for_nothing(), wait_for_a_moment()):
        scheduler.add(coroutine)
    scheduler.run()
    assert events == ["nothing", "moment", "message"]
    ours.close()
    theirs.close()


def test_what_a_coroutine_raises_ends_the_run_and_closes_the_others():
    closed = []

    async def wait():
        try:
            await pause(100)
        finally:
            closed.append(True)

    async def fail():
        await pause(0.01)
        raise ValueError("out of tea")

    scheduler = LaneScheduler()
    scheduler.add(wait())
    scheduler.add(fail())
    with pytest.raises(ValueError, match="out of tea"):
        scheduler.run()
    assert closed == [True]


def test_a_connection_that_ends_closes_its_lane():
    lane = Lane.create(SPEC, 1)
    ours, theirs = socket.socketpair()
    ended = []

    async def wait():
        link = LaneLink(lane, JsonSocket(theirs))
        await link.attach()
        try:
            await link.show(EpisodeCounter(1).first_row(np.zeros(1, np.float32)))
        except LaneClosed:
            ended.append(True)

    scheduler = LaneScheduler()
    scheduler.add(wait())
    threading.Timer(0.3, ours.close).start()
    scheduler.run()
    assert ended == [True]
