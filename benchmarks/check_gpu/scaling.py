"""Loss scaling with parameters and gradients on the host trains as it does on the device."""

from __future__ import annotations

from benchmarks.check_gpu.lines import Bench, Line, Measured
from benchmarks.check_gpu.run import run_trial
from benchmarks.check_gpu.settings import Setting

STEPS = 200
EPOCHS = 4  # the skipped steps are counted by epoch
# The scale grows so often that it overflows many times: skipped steps are what is checked.
GROWTH_INTERVAL = 10
# Of the first loss: the optimizers of host and device round differently, and 200 steps amplify that.
CLOSE = 0.05
FALLEN = 0.7  # the last loss over the first: 64 images are soon known by heart
_LAST = 20
SKIPPED = 2  # steps that may be skipped on one side only


def lines(bench: Bench) -> list[Line]:
    expected = (
        f"finite and falling; skipped steps (±{SKIPPED}), scale (×2) and loss (within {CLOSE:.0%}) as with offload=none"
    )
    return [Line("scaling", "precision=fp16 offload=cpu", bench.workers, expected, limit_s=180.0)]


def measure(line: Line, bench: Bench) -> Measured:
    host, device = (train_scaled(offload, bench) for offload in ("cpu", "none"))
    finite = all(abs(loss) < float("inf") for loss in host["losses"])  # false for NaN too
    first, last, other = host["losses"][0], mean_of_last(host["losses"]), mean_of_last(device["losses"])
    falling = last < FALLEN * first
    # CPU and GPU round differently, so a step near the limit may overflow on one side only.
    same = abs(host["skipped"] - device["skipped"]) <= SKIPPED and 0.5 <= host["scale"] / device["scale"] <= 2
    close = abs(last - other) <= CLOSE * first
    text = (
        f"loss {first:.3f} to {last:.3f} (offload=none {other:.3f}), skipped {host['skipped']:.0f} "
        f"({device['skipped']:.0f}), scale {host['scale']:g} ({device['scale']:g})"
    )
    return Measured(finite and falling and same and close, text, {"cpu": host, "none": device})


def mean_of_last(losses: list[float]) -> float:
    return sum(losses[-_LAST:]) / _LAST


def train_scaled(offload: str, bench: Bench) -> dict:
    """The loss of every step, the number of skipped ones, and the last scale."""
    batch = 8 * bench.workers
    setting: Setting = {
        "model.num_layers": 4 if bench.cuda else 1,  # a CPU emulates float16
        "precision": "fp16",
        "precision.growth_interval": GROWTH_INTERVAL,
        "offload": offload,
        "training.epochs": EPOCHS,
        "training.global_batch_size": batch,
        "data.num_train": STEPS // EPOCHS * batch,
        "data.num_val": batch,
    }
    run = run_trial(setting)
    skipped = sum(metrics["train/skipped_steps"] for metrics in run.epochs)
    return {"losses": run.losses, "skipped": skipped, "scale": run.metrics["train/loss_scale"]}
