"""CPU time of an update of the shallow net (T=20, B=32), with and without `keep_freed_memory`.

Last line: JSON.
"""

import json
import statistics
import subprocess
import sys
import time

import torch

from libtorchbeast.malloc import keep_freed_memory
from libtorchbeast.rows import Spec
from libtorchbeast.specs import ArraySpec, discrete
from torchbeast.core.learner import Learner
from torchbeast.models import make_model
from torchbeast.run.flags import TrainingFlags

T, B, A = 20, 32, 6
SPEC = Spec(ArraySpec("uint8", (4, 84, 84), 0, 255), discrete(A))
ROUNDS = 3


def measure(keep: bool) -> float:
    """CPU microseconds a step of one update, on one thread."""
    if keep:
        keep_freed_memory()
    torch.set_num_threads(1)
    model = make_model("shallow", SPEC, use_lstm=False)
    learner = Learner(model, TrainingFlags(), torch.device("cpu"))
    batch = {
        "frame": torch.randint(256, (T + 1, B, 4, 84, 84), dtype=torch.uint8),
        "reward": torch.randn(T + 1, B),
        "done": torch.zeros(T + 1, B, dtype=torch.bool),
        "truncated": torch.zeros(T + 1, B, dtype=torch.bool),
        "episode_step": torch.ones(T + 1, B, dtype=torch.int32),
        "episode_return": torch.zeros(T + 1, B),
        "last_action": torch.zeros(T + 1, B, dtype=torch.int64),
        "action": torch.zeros(T, B, dtype=torch.int64),
        "policy_logits": torch.zeros(T, B, A),
        "version": torch.zeros(B),
    }
    for _ in range(3):
        learner.step(batch, ())
    cpu = time.process_time()
    for _ in range(10):
        learner.step(batch, ())
    return 1e6 * (time.process_time() - cpu) / (10 * T * B)


def measure_apart(keep: bool) -> float:
    """`measure` in a process of its own, as the allocator's settings cannot be reverted."""
    command = [sys.executable, __file__, "keep" if keep else "release"]
    return float(subprocess.run(command, capture_output=True, check=True, text=True).stdout)


def main() -> None:
    kept = statistics.median(measure_apart(True) for _ in range(ROUNDS))
    released = statistics.median(measure_apart(False) for _ in range(ROUNDS))
    print(f"update: {released:.0f} us of CPU a step, with freed memory kept {kept:.0f} us")
    print(
        json.dumps(
            {
                "kept_us": round(kept, 1),
                "released_us": round(released, 1),
                "speedup": round(released / kept, 2),
            }
        )
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(measure(sys.argv[1] == "keep"))
    else:
        main()
