"""Several learners as one of PyTorch's process groups: gloo on CPUs, and NCCL on GPUs with it.

join_ranks     joins the learners that torchrun has started, by its environment variables
attend_rounds  lets a learner without a batch take part in the updates of the others
"""

import io
import json
import os
import threading
import time
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from torchbeast.core.learner import Learner, Publish
from torchbeast.core.rank_rounds import IDLE_ROUND_S, Stop
from torchbeast.core.ranks import ALONE, LostLearner, Place, Ranks
from torchbeast.runtime.threads import Threads, set_cpu_threads

TIMEOUT_S = 300.0  # more than the slowest update or checkpoint; a death is noticed at once
LOOK_S = 0.05  # interval of checks for the other learners and for signals
JOIN_S = 60.0  # time for an update in progress to end
MESSAGE_BYTES = 4096  # what is longer takes a second exchange


@contextmanager
def join_ranks(stop: Stop, device: torch.device) -> Iterator[Ranks]:
    """Join the learners that torchrun has started, or yield `ALONE`; each learns on a `device`.

    SystemExit if a signal comes while this waits for the others.
    """
    place = Place.find()
    if place.is_alone:
        yield ALONE
        return
    group = ProcessGroup(place, stop, on_gpu=device.type == "cuda")
    yield group
    group.leave()  # not after an error: others may wait in the middle of a collective


@contextmanager
def attend_rounds(learner: Learner, publish: Publish) -> Iterator[None]:
    """While entered by a learner thread, another thread joins rounds if no batch comes for a while.

    An exception of that thread sets `learner.finished`, and is raised again at the end.
    """
    if learner.ranks.size == 1:
        yield
        return
    ended = threading.Event()
    cpu_threads = torch.get_num_threads()  # of the learner thread that calls this

    def attend() -> None:
        # The same arithmetic as in learner threads: weights must stay the same on all ranks.
        set_cpu_threads(cpu_threads)
        torch.set_flush_denormal(True)
        while not ended.wait(IDLE_ROUND_S) and not learner.finished.is_set():
            if learner.rounds.idle_s < IDLE_ROUND_S:
                continue
            learner.update(None, (), publish)

    threads = Threads("idle-rank", 1, attend, learner.finished)
    try:
        yield
    finally:
        ended.set()
        threads.join(JOIN_S)


class ProcessGroup:
    """`Ranks` over torch.distributed."""

    def __init__(self, place: Place, stop: Stop, on_gpu: bool = False) -> None:
        """Waits until all ranks are there."""
        import torch.distributed as dist

        self.rank, self.size = place.rank, place.size
        self._dist = dist
        limit = timedelta(seconds=TIMEOUT_S)
        with _others():
            torchrun_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            meeting_point = dist.TCPStore(
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                is_master=place.rank == 0 and not torchrun_serves,
                wait_for_workers=False,
                timeout=limit,
            )
            name = agree_on_name(meeting_point, place, stop)
            self._store = dist.PrefixStore(f"torchbeast/{name}", meeting_point)
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
                store=dist.PrefixStore("group", self._store),
                rank=self.rank,
                world_size=self.size,
                timeout=limit,
            )

    def leave(self) -> None:
        self._dist.destroy_process_group()

    def wrap(self, loss: nn.Module, device: torch.device) -> nn.Module:
        """Wrap `loss` in DistributedDataParallel: takes over rank 0's weights, but not its buffers.

        Each pass looks for parameters that the loss does not depend on: a model may have some, and
        the loss of a rank without rollouts depends on hardly any.
        """
        with _others(), warnings.catch_warnings():
            # Newer versions have another name for `broadcast_buffers`, which older ones lack.
            warnings.simplefilter("ignore", FutureWarning)
            return nn.parallel.DistributedDataParallel(
                loss,
                device_ids=[device] if device.type == "cuda" else None,
                broadcast_buffers=False,
                find_unused_parameters=True,
            )

    def backward(self, loss: Tensor) -> None:
        """Backward pass with gradients summed over ranks: DistributedDataParallel takes the mean,
        so the loss is multiplied by their number."""
        with _others("gloo", "NCCL"):
            (loss * self.size).backward()

    def sum(self, tensor: Tensor) -> Tensor:
        total = tensor.clone().contiguous()
        with _others():
            self._dist.all_reduce(total)
        return total

    def gather(self, tensor: Tensor) -> Tensor:
        gathered = tensor.new_empty((self.size, *tensor.shape))
        with _others():
            self._dist.all_gather(list(gathered.unbind()), tensor.contiguous())
        return gathered

    def exchange(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Exchange messages as JSON after their length; what exceeds MESSAGE_BYTES follows."""
        data = json.dumps(message).encode()
        text = data[: MESSAGE_BYTES - 8].ljust(MESSAGE_BYTES - 8)
        first = self.gather(_bytes(len(data).to_bytes(8, "big") + text))
        heads = [bytes(row.numpy()) for row in first]
        lengths = [int.from_bytes(head[:8], "big") for head in heads]
        texts = [head[8:] for head in heads]
        longest = max(lengths) - (MESSAGE_BYTES - 8)
        if longest > 0:
            rest = self.gather(_bytes(data[MESSAGE_BYTES - 8 :].ljust(longest)))
            texts = [text + bytes(row.numpy()) for text, row in zip(texts, rest, strict=True)]
        return [json.loads(text[:n]) for text, n in zip(texts, lengths, strict=True)]

    def share(self, contents: Any) -> Any:
        packed = io.BytesIO()
        if self.rank == 0:
            torch.save(contents, packed)
        length = torch.tensor([packed.tell()])
        with _others():
            self._dist.broadcast(length, 0)
            data = _bytes(packed.getvalue().ljust(int(length)))
            self._dist.broadcast(data, 0)
        if self.rank == 0:
            return contents
        file = io.BytesIO(data.numpy().tobytes())
        return torch.load(file, map_location="cpu", weights_only=True)

    def look_up(self, name: str) -> str | None:
        with _others():
            return self._store.get(name).decode() if self._store.check([name]) else None

    def write(self, name: str, text: str) -> None:
        with _others():
            self._store.compare_set(name, "", text)


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


@contextmanager
def _others(*words: str) -> Iterator[None]:
    """Turn PyTorch's errors about other processes into LostLearner.

    With `words`, only errors that contain one of them are taken for such.
    """
    try:
        yield
    except RuntimeError as error:
        if words and not any(word in str(error) for word in words):
            raise
        reason = str(error).split("\n")[0].split(". This is")[0]
        raise LostLearner(
            "Another learner has ended or does not answer, so this one ends, too: with "
            f"--max-restarts torchrun restarts all of them ({reason})."
        ) from error


def agree_on_name(store: Any, place: Place, stop: Stop) -> str:
    """Wait until all ranks are there, and agree on a name for this start, new and the same on all.

    torchrun's store outlives the learners that it restarts, so that entries in it may be those of
    dead ones. So each rank writes a new, random word; rank 0 writes a name together with the words
    that it has read; and the name holds once each rank has found its own word and confirmed it.
    """
    word, name, named = uuid.uuid4().hex, "", ""
    store.set(f"word/{place.rank}", word)
    deadline = time.monotonic() + TIMEOUT_S
    ranks = range(place.size)

    def read(key: str) -> str:
        return store.get(key).decode() if store.check([key]) else ""

    while not name or not store.check([f"go/{name}"]):
        if stop.signal is not None:
            raise SystemExit(stop.exit_code)
        if time.monotonic() > deadline:
            raise RuntimeError(f"not all {place.size} learners were there within {TIMEOUT_S:.0f} s")
        if place.rank == 0:
            words = " ".join(read(f"word/{rank}") or "?" for rank in ranks)
            if words != named:
                name, named = uuid.uuid4().hex, words
                store.set("name", f"{name} {words}")
            if all(read(f"heard/{rank}") == name for rank in ranks):
                store.set(f"go/{name}", "")
        heard, *words_heard = read("name").split() or [""]
        if words_heard and words_heard[place.rank] == word:
            name = heard
            store.set(f"heard/{place.rank}", name)
        time.sleep(LOOK_S)
    return name
