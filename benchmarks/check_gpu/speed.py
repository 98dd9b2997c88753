"""What the product costs: step time against a script written by hand, and with a memory profile against without."""

from __future__ import annotations

import statistics

from benchmarks.check_gpu.lines import Bench, Line, Measured
from benchmarks.check_gpu.run import Run, run_trial
from benchmarks.check_gpu.settings import OPTIONS, Setting, trial

LEAST_RATIO = 0.95  # of the samples/s of the script
MOST_COST = 1.03  # of the step time without a profile
ROUNDS = 3
_BARE, _PROFILE = "against a script by hand", "memory_profile=peaks against off"
_FOLLOWED = 2  # steps of a run that memory_profile=peaks follows
_WARMUP = 3 + _FOLLOWED


def lines(bench: Bench) -> list[Line]:
    about = f"{model(bench)} per_block bf16_mixed, "
    ratio = f"{LEAST_RATIO:g} of its samples/s or more" if bench.cuda else "reported: the cores are shared"
    cost = f"{MOST_COST:g} of the step time or less" if bench.cuda else "reported: the cores are shared"
    return [
        Line("speed", about + _BARE, bench.workers, ratio, _BARE, limit_s=240.0),
        Line("speed", about + _PROFILE, bench.workers, cost, _PROFILE, limit_s=240.0),
    ]


def model(bench: Bench) -> str:
    return "vit_b_16" if bench.cuda else "vit_tiny"


def setting_of(bench: Bench, profile: str) -> Setting:
    """Enough steps for a median on a GPU, in one epoch."""
    batch, steps = batch_size(bench) * bench.workers, num_steps(bench)
    return {
        "model": model(bench),
        "sharding": "per_block",
        "precision": "bf16_mixed",
        "training.global_batch_size": batch,
        "training.timing_warmup_steps": _WARMUP - (_FOLLOWED if profile != "off" else 0),
        "data.num_train": batch * steps,
        "data.num_val": batch,
        "data.loader_workers": bench.loader_workers(bench.workers),
        "memory_profile": profile,
    }


def batch_size(bench: Bench) -> int:
    return 64 if bench.cuda else 8


def num_steps(bench: Bench) -> int:
    return 40 if bench.cuda else 12


def measure(line: Line, bench: Bench) -> Measured:
    return compare_bare(bench) if line.case == _BARE else compare_profile(bench)


def compare_bare(bench: Bench) -> Measured:
    """Both in turn: what slows the machine down slows both."""
    from benchmarks.check_gpu import bare

    setting = setting_of(bench, "off")
    options = {k: v for k, v in OPTIONS["model"][model(bench)].items() if k not in ("_target_", "num_channels")}
    channels = OPTIONS["model"][model(bench)]["num_channels"]
    ours, by_hand, mfu = [], [], []
    for _ in range(ROUNDS):
        metrics = run_trial(setting).metrics
        ours.append(setting["training.global_batch_size"] / metrics["perf/step_time_p50_s"])
        times = bare.step_times(options, channels, batch_size(bench), num_steps(bench), setting["data.loader_workers"])
        by_hand.append(setting["training.global_batch_size"] / statistics.median(times[_WARMUP:]))
        mfu.append(mfu_of(ours[-1], bench))
    ratio = statistics.median(ours) / statistics.median(by_hand)
    text = f"{ratio:.3f}: {statistics.median(ours):.0f} against {statistics.median(by_hand):.0f} samples/s"
    if mfu[0] is not None:
        text += f", MFU {statistics.median(mfu):.2f}"
    passed = ratio >= LEAST_RATIO or not bench.cuda
    return Measured(passed, text, {"ratio": ratio, "ours": ours, "by_hand": by_hand, "mfu": mfu})


def mfu_of(samples_per_s: float, bench: Bench) -> float | None:
    """The share of the devices' dense bfloat16 peak; None where that is not known."""
    from fsdp_lab.config.parallel import Dtype
    from fsdp_lab.training.speed import PEAK_FLOPS
    from fsdp_lab.workloads.build import build_workload

    peak = PEAK_FLOPS.get(bench.machine.name, {}).get(Dtype.bfloat16) if bench.cuda else None
    if peak is None:
        return None
    config = trial(setting_of(bench, "off"))
    flops = build_workload(config.model, config.data, config.task).train_flops_per_sample()
    assert flops is not None
    return samples_per_s * flops / (peak * bench.workers)


def compare_profile(bench: Bench) -> Measured:
    """The median step of runs with and without a profile, in turn, and what the followed steps took."""
    medians: dict[str, list[float]] = {"off": [], "peaks": []}
    followed: dict[str, list[float]] = {"off": [], "peaks": []}
    for _ in range(ROUNDS):
        for profile in medians:
            run = run_trial(setting_of(bench, profile))
            medians[profile].append(run.metrics["perf/step_time_p50_s"])
            followed[profile].append(first_steps(run))
    ratio = statistics.median(medians["peaks"]) / statistics.median(medians["off"])
    extra = statistics.median(followed["peaks"]) - statistics.median(followed["off"])
    text = f"{ratio:.3f} of the step time; following {_FOLLOWED} steps took {extra:.2f} s more than not following them"
    passed = ratio <= MOST_COST or not bench.cuda
    return Measured(passed, text, {"ratio": ratio, "medians_s": medians, "first_steps_s": followed})


def first_steps(run: Run) -> float:
    """Seconds from the begin of the first step to the begin of the first that is not followed."""
    return run.step_begins[_FOLLOWED] - run.step_begins[0]
