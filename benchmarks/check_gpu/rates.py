"""How fast this device multiplies matrices, by dtype: reported, to read the speeds by."""

from __future__ import annotations

from benchmarks.check_gpu.lines import Bench, Line, Measured

_SIZE = 8192
_WARMUP, _TIMED = 3, 5


def lines(bench: Bench) -> list[Line]:
    if not bench.cuda:
        return []
    return [
        Line("rates", f"matrix product {dtype}", bench.workers, "reported", dtype)
        for dtype in ("float32", "bfloat16", "float16")
    ]


def measure(line: Line, bench: Bench) -> Measured:
    """The median of some products, on each rank's own device."""
    import torch

    a, b = (torch.randn(_SIZE, _SIZE, device="cuda", dtype=getattr(torch, line.case)) for _ in range(2))
    seconds = []
    for _ in range(_WARMUP + _TIMED):
        begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begun.record()
        a @ b
        ended.record()
        torch.cuda.synchronize()
        seconds.append(begun.elapsed_time(ended) / 1000)
    rate = 2 * _SIZE**3 / sorted(seconds[_WARMUP:])[_TIMED // 2]
    return Measured(True, f"{rate / 1e12:.0f} TFLOP/s", {"flops": rate})
