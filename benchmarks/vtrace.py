"""V-trace's scan over time compared with a plain Python loop, at T=80, B=32. Last line: JSON."""

import json
import timeit

import torch
from torch import Tensor

from torchbeast.core.vtrace import suffix_scan

T, B = 80, 32


def plain_loop(decays: Tensor, deltas: Tensor) -> Tensor:
    """x[t] = deltas[t] + decays[t] * x[t + 1], one t after the other."""
    x = torch.zeros_like(deltas[0])
    result = []
    for t in reversed(range(len(deltas))):
        x = deltas[t] + decays[t] * x
        result.append(x)
    result.reverse()
    return torch.stack(result)


def best_us(function: object) -> float:
    times = timeit.repeat(function, number=200, repeat=7)  # type: ignore[arg-type]
    return 1e6 * min(times) / 200


def main() -> None:
    torch.set_num_threads(1)
    decays, deltas = torch.rand(T, B), torch.randn(T, B)
    torch.testing.assert_close(suffix_scan(decays, deltas), plain_loop(decays, deltas))
    loop_us = best_us(lambda: plain_loop(decays, deltas))
    scan_us = best_us(lambda: suffix_scan(decays, deltas))
    print(f"T={T}, B={B}: plain loop {loop_us:.0f} us, scan {scan_us:.0f} us")
    print(
        json.dumps(
            {
                "loop_us": round(loop_us, 1),
                "scan_us": round(scan_us, 1),
                "speedup": round(loop_us / scan_us, 2),
            }
        )
    )


if __name__ == "__main__":
    main()
