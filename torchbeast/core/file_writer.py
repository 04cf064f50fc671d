"""A run's files: logs.csv, fields.csv, out.log and meta.json in <rootdir>/<xpid>."""

import csv
import datetime
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

logger = logging.getLogger("torchbeast")


class FileWriter:
    """Logs rows of figures to CSV; for a run that exists already, it appends to its files."""

    def __init__(
        self,
        xpid: str | None = None,
        xp_args: dict[str, Any] | None = None,
        rootdir: str | os.PathLike[str] = "~/logs/torchbeast",
        symlink_to_latest: bool = True,
    ) -> None:
        self.xpid = xpid or new_xpid()
        root = Path(rootdir).expanduser()
        self.basepath = root / self.xpid
        self.basepath.mkdir(parents=True, exist_ok=True)
        self.paths = {
            "msg": self.basepath / "out.log",
            "logs": self.basepath / "logs.csv",
            "fields": self.basepath / "fields.csv",
            "meta": self.basepath / "meta.json",
        }
        if symlink_to_latest:
            _point(root / "latest", self.basepath)

        self._message_handler = MessageFile(self.paths["msg"])
        logger.addHandler(self._message_handler)

        before = self._read_metadata()
        self.metadata: dict[str, Any] = {
            "xpid": self.xpid,
            "args": _plain(xp_args or {}),
            "command": " ".join(sys.argv),
            "host": socket.gethostname(),
            "git_commit": _git_commit(),
            "date_start": _now(),
            "date_end": None,
            "successful": False,
        }
        self.metadata["history"] = [*before.get("history", []), self._start(before)]
        self._write_metadata()

        self._fields, self._tick = self._read_fields()
        self._file = self.paths["logs"].open("a", newline="")
        self._closed = False

    def log(self, to_log: dict[str, Any], tick: int | None = None, verbose: bool = False) -> None:
        """Add a row; `_tick` counts rows, `_time` is the time in seconds."""
        self._tick = self._tick if tick is None else tick
        row = {"_tick": self._tick, "_time": time.time(), **to_log}
        self._tick += 1
        unknown = [name for name in row if name not in self._fields]
        if unknown:
            self._add_fields(unknown)
        csv.DictWriter(self._file, self._fields).writerow(row)
        self._file.flush()
        if verbose:
            logger.info("LOG | %s", row)

    def resume_at(self, step: int) -> None:
        """Remove the rows logged after the checkpoint from which this start resumes."""
        self.metadata["history"][-1]["step"] = step
        self._write_metadata()
        self._rewrite(lambda row: not row.get("step") or int(row["step"]) <= step, self._fields)
        _, self._tick = self._read_fields()

    def close(self, successful: bool = True) -> None:
        """Close the files and note the end in meta.json; may be called more than once."""
        if self._closed:
            return
        self._closed = True
        self._file.close()
        self.metadata["date_end"] = _now()
        self.metadata["successful"] = successful
        self._write_metadata()
        logger.removeHandler(self._message_handler)
        self._message_handler.close()

    def _read_fields(self) -> tuple[list[str], int]:
        """The columns and the number of rows of an earlier run under this name."""
        if not self.paths["logs"].exists():
            return [], 0
        with self.paths["logs"].open(newline="") as file:
            rows = csv.reader(file)
            return next(rows, []), sum(1 for _ in rows)

    def _add_fields(self, names: list[str]) -> None:
        """Write the log again with more columns, so that it stays one table."""
        fields = [*self._fields, *names]
        self._rewrite(lambda row: True, fields)
        self._fields = fields
        with self.paths["fields"].open("a", newline="") as file:
            csv.writer(file).writerow(fields)

    def _rewrite(self, keep: Callable[[dict[str, str]], bool], fields: list[str]) -> None:
        """Replace the log atomically by one with these columns and the rows to keep."""
        if not fields:
            return
        path = self.paths["logs"]
        with path.open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if keep(row)]
        beside = path.with_suffix(".tmp")
        with beside.open("w", newline="") as file:
            writer = csv.DictWriter(file, fields, restval="", extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
        beside.replace(path)
        before, self._file = self._file, path.open("a", newline="")
        before.close()

    def _read_metadata(self) -> dict[str, Any]:
        """The meta.json of an earlier start of this run; empty if there is none."""
        try:
            return json.loads(self.paths["meta"].read_text())
        except FileNotFoundError:
            return {}
        except ValueError as error:
            logger.warning(
                "%s cannot be read, so its record of earlier starts is replaced: %s",
                self.paths["meta"],
                error,
            )
            return {}

    def _start(self, before: dict[str, Any]) -> dict[str, Any]:
        """This start's entry in the history, with the arguments that differ from the last start."""
        names = ("date_start", "command", "host", "git_commit")
        start = {name: self.metadata[name] for name in names}
        old, new = before.get("args", {}), self.metadata["args"]
        changed = [name for name in new if name in old and old[name] != new[name]]
        changes = {name: [old[name], new[name]] for name in changed}
        return {**start, "changes": changes, "step": 0}

    def _write_metadata(self) -> None:
        beside = self.paths["meta"].with_suffix(".tmp")
        beside.write_text(json.dumps(self.metadata, indent=2) + "\n")
        beside.replace(self.paths["meta"])


class MessageFile(logging.FileHandler):
    """A log handler that appends messages to a file."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        form = "[%(levelname)s:%(process)d %(asctime)s] %(message)s"
        self.setFormatter(logging.Formatter(form))

    def handleError(self, record: logging.LogRecord) -> None:
        """On a full disk, no traceback: the terminal still shows the message."""


def new_xpid() -> str:
    """A new name for a run; under torchrun the same for all learners and restarts."""
    if (launch := os.environ.get("TORCHELASTIC_RUN_ID")) is not None:
        # "none" if torchrun was given no --rdzv_id; then its own process identifies the launch.
        name = _start_of(os.getppid()) if launch == "none" else launch[:36].replace("/", "-")
        return f"torchbeast-{name}"
    return f"torchbeast-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def _start_of(pid: int) -> str:
    """A name for a process, different from those of all processes before it."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:  # not Linux
        return str(pid)
    return f"{boot[:8]}-{stat.rpartition(')')[2].split()[19]}-{pid}"  # its start, in clock ticks


def _point(link: Path, target: Path) -> None:
    """Make `link` a symbolic link to `target`, unless something else stands there."""
    if link.exists() and not link.is_symlink():
        return
    beside = link.with_name(f"{link.name}.{os.getpid()}.tmp")
    try:
        beside.symlink_to(target.resolve(), target_is_directory=True)
        beside.replace(link)
    except OSError as error:  # a file system without links
        logger.warning("Cannot point %s at this run: %s", link, error)


def _git_commit() -> str | None:
    """The commit of the running code, if it is a git checkout."""
    try:
        return subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _plain(args: dict[str, Any]) -> dict[str, Any]:
    """Arguments as they are when read from JSON."""
    return json.loads(json.dumps(args, default=str))


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
