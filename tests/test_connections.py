"""connections.csv, and the command that shows it."""

import csv

import pytest
import torch

from libtorchbeast.rpc.connected_clients import ClientFigures
from torchbeast import status
from torchbeast.run.connections import FILE, OWN, Connections


class FakeQueue:
    """Gives batches of three columns, T=2: two steps of the first, one of the second, none."""

    def __next__(self):
        rows = {
            "source": torch.tensor([[0, 1, 1]] * 3),
            "truncated": torch.tensor(
                [[False] * 3, [False, False, True], [False, True, True]], dtype=torch.bool
            ),
        }
        return (rows, {"version": torch.tensor([[0] * 3, [90, 80, 0], [70, 0, 0]])}), ()

    def size(self):
        return 5


BOX = ClientFigures("name:box", "box", "ipv4:192.0.2.7", since=0.0, streams=1, environments=2)


@pytest.fixture
def connections(tmp_path):
    clients = [BOX, ClientFigures("x", "y", "ipv4:192.0.2.8", since=0.0, refused=3)]
    whose = ("name:box", "")
    return Connections(FakeQueue(), tmp_path, lambda: 100, whose.__getitem__, lambda: clients)


def test_what_is_learnt_from_whom_is_written(connections, tmp_path):
    for _, _ in zip(range(3), connections, strict=False):
        pass
    assert connections.size() == 5
    connections.poll()
    with (tmp_path / FILE).open(newline="") as file:
        rows = {row["name"]: row for row in csv.DictReader(file)}
    assert set(rows) == {"box", "y", OWN}
    box, own = rows["box"], rows[OWN]
    steps = int(box["steps"])
    assert steps == 2 * int(own["steps"]) >= 6
    assert (box["share"], box["lag"], own["share"], own["lag"]) == (
        "0.667",
        "20.0",
        "0.333",
        "20.0",
    )
    assert (box["address"], box["streams"], box["environments"]) == ("ipv4:192.0.2.7", "1", "2")
    assert (rows["y"]["refused"], rows["y"]["share"], rows["y"]["lag"]) == ("3", "0.000", "")
    assert own["streams"] == ""


def test_who_is_forgotten_by_the_gateway_is_forgotten_here(connections):
    next(connections)
    assert [row["name"] for row in connections._rows([BOX])] == [OWN, "box"]
    assert [row["name"] for row in connections._rows([])] == [OWN, "name:box"]
    assert [row["name"] for row in connections._rows([])] == [OWN]


def test_whether_there_were_clients_is_known_after_they_have_left(connections, tmp_path):
    """A run that learnt from a client does not end for what that client had sent."""
    assert not connections.had_clients
    next(connections)
    for _ in range(2):
        connections._rows([])  # the gateway has forgotten it
    assert connections.had_clients
    own = Connections(FakeQueue(), tmp_path, lambda: 0, lambda source: "", list)
    next(own)
    assert not own.had_clients


def test_a_run_to_which_nobody_connects_has_no_such_file(tmp_path):
    connections = Connections(FakeQueue(), tmp_path, lambda: 0, lambda source: "", list)
    next(connections)
    connections.poll()
    assert list(tmp_path.iterdir()) == []


def test_status_shows_the_file(connections, tmp_path, capsys):
    next(connections)
    connections.poll()
    assert status.main([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == list(status.COLUMNS)
    assert any(line.split()[:4] == ["box", "ipv4:192.0.2.7", "1", "2"] for line in lines)


def test_status_of_a_run_without_connections_or_of_none(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    assert status.main(["run", "--savedir", str(tmp_path)]) == 0
    assert "No client has connected" in capsys.readouterr().out
    assert status.main(["other", "--savedir", str(tmp_path)]) == 2
    assert "give a run's folder, or its --xpid" in capsys.readouterr().err
