"""Messages with descriptors: whole or not at all, and each descriptor with its own message."""

import os
import resource
import socket

import pytest

from libtorchbeast.json_socket import MAX_MESSAGE_BYTES, JsonSocket, UnknownProtocol
from tests.helpers.threads import run_in_threads


@pytest.fixture
def pair():
    ours, theirs = (JsonSocket(end) for end in socket.socketpair())
    yield ours, theirs
    ours.close()
    theirs.close()


def test_messages_arrive_in_order_with_their_descriptors(pair):
    ours, theirs = pair
    read_end, write_end = os.pipe()
    ours.send("first", number=1)
    ours.send("second", fd=write_end, text="ä" * 1000)
    ours.send("third")
    os.close(write_end)  # the message has a copy
    first, second, third = (theirs.next() for _ in range(3))
    assert theirs.next() is None
    assert (first["kind"], first["number"], third["kind"]) == ("first", 1, "third")
    assert second["text"] == "ä" * 1000
    os.write(second["fd"], b"x")
    assert os.read(read_end, 1) == b"x"
    for fd in (read_end, second["fd"]):
        os.close(fd)


def test_several_threads_may_send(pair):
    ours, theirs = pair
    got = []

    def send(sender):
        for i in range(2000):
            ours.send("note", sender=sender, number=i)

    with run_in_threads(*(lambda sender=s: send(sender) for s in range(3))) as threads:
        while len(got) < 6000:
            if (message := theirs.next()) is not None:
                got.append((message["sender"], message["number"]))
            elif not any(thread.is_alive() for thread in threads):
                ours.flush()
    for sender in range(3):
        assert [n for s, n in got if s == sender] == list(range(2000))


def test_messages_larger_than_the_sockets_memory_come_in_pieces(pair):
    ours, theirs = pair
    text = "x" * (MAX_MESSAGE_BYTES - 100)
    ours.send("long", text=text)
    ours.send("short")
    messages = []
    while len(messages) < 2:
        ours.flush()
        message = theirs.next()
        messages += [message] if message else []
    assert messages[0]["text"] == text
    assert messages[1]["kind"] == "short"


def test_a_descriptor_that_is_lost_is_missed_by_its_own_message_alone(pair):
    """No descriptor is left at the receiver: the kernel drops it, and says so to nobody else."""
    ours, theirs = pair
    read_end, write_end = os.pipe()
    ours.send("lost", fd=read_end)
    ours.send("kept", fd=write_end)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    received = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        received.append(theirs.next())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    while len(received) < 2:
        received.append(theirs.next())
    lost, kept = received
    assert lost["kind"] == "lost"
    assert lost["fd"] is None
    assert kept["kind"] == "kept"
    for fd in (read_end, write_end, *([kept["fd"]] if kept["fd"] is not None else [])):
        os.close(fd)


def read_all(reader):
    while True:
        reader.next()


@pytest.mark.parametrize(
    "data",
    [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x00\x00\x12\x04\x00\x00\x00\x00\x00",  # HTTP/2's first frame of a server
        (3).to_bytes(4, "little") + b"{a}",
        (2).to_bytes(4, "little") + b"[]",
        (0).to_bytes(4, "little"),
        (4).to_bytes(4, "little") + b"\xff\xfe\xfd\xfc",
        (1 << 14).to_bytes(4, "little") + b"[" * (1 << 14),
    ],
)
def test_another_language_is_noticed(data):
    theirs, stranger = socket.socketpair()
    reader = JsonSocket(theirs)
    stranger.sendall(data)
    with pytest.raises(UnknownProtocol):
        read_all(reader)
    reader.close()
    stranger.close()


def test_the_end_is_noticed_after_the_last_message(pair):
    ours, theirs = pair
    ours.send("last")
    ours.close()
    assert theirs.next()["kind"] == "last"
    with pytest.raises(EOFError):
        theirs.next()


def test_only_the_kernel_brings_descriptors_and_none_is_left_behind(pair):
    ours, theirs = pair
    before = len(os.listdir("/proc/self/fd"))
    text = b'{"kind": "lane", "has_fd": false, "fd": 2}'
    socket.send_fds(ours._socket, [len(text).to_bytes(4, "little") + text], [0, 1, 2])
    assert "fd" not in theirs.next()
    assert len(os.listdir("/proc/self/fd")) <= before  # fewer, if an earlier test left some
