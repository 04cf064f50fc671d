"""TensorBoard event files beside the CSV."""

import errno
import io
import os
import socket
import time
from pathlib import Path
from typing import Any

from torchbeast.report.figures import tag_of


class TensorBoard:
    """Writes each figure as a scalar over environment steps.

    PyTorch's SummaryWriter will not do: on a full disk its thread ends for good, with a traceback.
    """

    def __init__(self, directory: Path, first_step: int) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2  # slow to import
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary, self._record_writer = event_pb2, summary_pb2, RecordWriter
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        self._file = (directory / name).open("ab", buffering=0)
        self._header = [self._event.Event(wall_time=time.time(), file_version="brain.Event:2")]
        if first_step:
            # TensorBoard then discards what an earlier start wrote beyond its last checkpoint.
            log = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._header.append(event_pb2.Event(step=first_step, session_log=log))

    def log(self, figures: dict[str, float | int | None], step: int) -> None:
        """Add the figures of a step. After an OSError the file is as it was before."""
        values = [
            self._summary.Summary.Value(tag=tag_of(name), simple_value=value)
            for name, value in figures.items()
            if value is not None and name != "step"
        ]
        summary = self._summary.Summary(value=values)
        event = self._event.Event(wall_time=time.time(), step=step, summary=summary)
        self._write([*self._header, event])
        self._header = []

    def close(self) -> None:
        self._file.close()

    def _write(self, events: list[Any]) -> None:
        records = io.BytesIO()
        writer = self._record_writer(records)
        for event in events:
            writer.write(event.SerializeToString())
        size = os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(records.getbuffer()) < len(records.getbuffer()):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            os.ftruncate(self._file.fileno(), size)  # half a record would hide what follows
            raise
