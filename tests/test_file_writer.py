"""The files of a run."""

import csv
import json
import logging

from torchbeast.core.file_writer import FileWriter


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_run_leaves_its_files(tmp_path):
    writer = FileWriter("run", {"seed": 3}, tmp_path)
    logging.getLogger("torchbeast").warning("a message")
    writer.log({"step": 1, "loss": 0.5})
    writer.close()
    folder = tmp_path / "run"
    assert {p.name for p in folder.iterdir()} == {"logs.csv", "fields.csv", "out.log", "meta.json"}
    assert read(folder / "logs.csv")[0]["loss"] == "0.5"
    assert "a message" in (folder / "out.log").read_text()
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["args"] == {"seed": 3}
    assert meta["successful"] is True
    assert (tmp_path / "latest").resolve() == folder.resolve()


def test_new_fields_and_missing_ones_keep_one_table(tmp_path):
    writer = FileWriter("run", rootdir=tmp_path)
    writer.log({"step": 1})
    writer.log({"step": 2, "return": None, "loss": 1.0})
    writer.log({"step": 3})
    writer.close(successful=False)
    rows = read(tmp_path / "run" / "logs.csv")
    assert [row["step"] for row in rows] == ["1", "2", "3"]
    assert [row["loss"] for row in rows] == ["", "1.0", ""]
    assert rows[1]["return"] == ""
    assert len((tmp_path / "run" / "fields.csv").read_text().splitlines()) == 2


def test_a_resumed_run_goes_on_with_its_table(tmp_path):
    for steps in ((1, 2), (3,)):
        writer = FileWriter("run", rootdir=tmp_path)
        for step in steps:
            writer.log({"step": step})
        writer.close()
    rows = read(tmp_path / "run" / "logs.csv")
    assert [(row["_tick"], row["step"]) for row in rows] == [("0", "1"), ("1", "2"), ("2", "3")]


def test_ticks_go_on_without_a_gap_after_rows_are_dropped(tmp_path):
    writer = FileWriter("run", rootdir=tmp_path)
    for step in (1, 2, 3):
        writer.log({"step": step})
    writer.close()
    writer = FileWriter("run", rootdir=tmp_path)
    writer.resume_at(1)
    writer.log({"step": 2})
    writer.close()
    rows = read(tmp_path / "run" / "logs.csv")
    assert [(row["_tick"], row["step"]) for row in rows] == [("0", "1"), ("1", "2")]


def test_latest_follows_the_last_run_and_spares_a_real_folder(tmp_path):
    for name in ("a", "b"):
        FileWriter(name, rootdir=tmp_path).close()
    assert (tmp_path / "latest").resolve() == (tmp_path / "b").resolve()
    other = tmp_path / "other"
    (other / "latest").mkdir(parents=True)
    FileWriter("c", rootdir=other).close()
    assert not (other / "latest").is_symlink()
