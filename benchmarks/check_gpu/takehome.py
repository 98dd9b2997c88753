"""A setting that was taken home does what the trial did: the script of plain PyTorch, and accelerate with its file.

The lines of accelerate are there where it is installed and there are GPUs, without which it shards nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.check_gpu.lines import Bench, Line, Measured
from benchmarks.check_gpu.parity import CPU_FP32, CUDA_FP32, HALF, LEARNING
from benchmarks.check_gpu.run import run_trial
from benchmarks.check_gpu.settings import Setting, trial, words

_SIZES: Setting = {"training.global_batch_size": 32, "data.num_train": 128, "data.num_val": 32}
SCRIPTS: tuple[Setting, ...] = (
    {"sharding": "per_block", "precision": "bf16_mixed", "reshard_after_forward": "always"},
    {"sharding": "per_layer", "precision": "fp16", "offload": "cpu"},
    {"sharding": "ddp", "precision": "bf16"},
)
LAUNCHES: tuple[Setting, ...] = (
    {"sharding": "per_block"},
    {"sharding": "per_block", "precision": "bf16", "offload": "cpu", "reshard_after_forward": "never"},
)
# A script that leaves sharding and precision to accelerate; the batches of its first epoch are the trial's.
TRAIN = """
import json, os, torch
from accelerate import Accelerator
from torch.distributed.fsdp import FSDPModule
from fsdp_lab.config.workload import DataConfig, ModelConfig
from fsdp_lab.workloads.build import build_data_spec
from fsdp_lab.workloads.vision.vit import build_model

accelerator = Accelerator()
torch.manual_seed(0)
model = build_model(ModelConfig()).build()
optimizer = torch.optim.Adam(model.parameters(), lr={lr}, weight_decay={weight_decay})
model, optimizer = accelerator.prepare(model, optimizer)
items = build_data_spec(DataConfig(name="synthetic", num_train=128, num_val=32), ModelConfig(), None).load().train
order = torch.randperm(128, generator=torch.Generator().manual_seed(0))
losses = []
for mine in order.view(4, accelerator.num_processes, -1)[:, accelerator.process_index]:
    images, labels = (part.to(accelerator.device) for part in items[mine])
    loss = torch.nn.functional.cross_entropy(model(images).float(), labels)
    accelerator.backward(loss)
    losses.append(accelerator.reduce(loss.detach(), "mean").item())
    optimizer.step()
    optimizer.zero_grad()
if accelerator.is_main_process:
    units = sum(isinstance(module, FSDPModule) for module in model.modules())
    print(json.dumps({{"losses": losses, "units": units}}), flush=True)
accelerator.end_training()
"""


def lines(bench: Bench) -> list[Line]:
    planned = [
        Line("takehome", f"use_pytorch.py {words(case)}", bench.workers, _expected(case, bench), case)
        for case in SCRIPTS
    ]
    if bench.cuda and find_spec("accelerate"):
        planned += [
            Line("takehome", f"accelerate {words(case)}", bench.workers,
                 f"5 FSDP2 modules, {_expected(case, bench)}", case, limit_s=180)
            for case in LAUNCHES
        ]  # fmt: skip
    return planned


def measure(line: Line, bench: Bench) -> Measured:
    import torch.distributed as dist

    from fsdp_lab.takehome import read_setup, write_out

    setting = {**LEARNING, **_SIZES, **line.case}
    run = run_trial(setting)
    setup = read_setup("Trial 0", trial(setting), run.known)
    assert setup is not None
    if line.setting.startswith("use_pytorch.py"):
        outcome: dict[str, Any] = {"losses": run_script(write_out("pytorch", setup))}
    else:
        launched = [launch(write_out("accelerate", setup)) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(launched)
        assert launched[0] is not None
        outcome = launched[0]
    apart = max(abs(a - b) for a, b in zip(run.losses, outcome["losses"], strict=True))
    units = outcome.get("units", 5)
    passed = apart <= _tolerance(line.case, bench) and units == 5
    return Measured(
        passed, f"apart by {apart:.1e}" + (f", {units} FSDP2 modules" if "units" in outcome else ""), outcome
    )


def run_script(script: str) -> list[float]:
    """Run a script on these ranks, and return the losses of its last epoch.

    The ranks have joined already, and continue after it.
    """
    import torch.distributed as dist

    names: dict[str, Any] = {"__name__": "__main__"}
    with ExitStack() as patches:
        for module, name in (dist, "init_process_group"), (dist, "destroy_process_group"), (os, "_exit"):
            patches.enter_context(mock.patch.object(module, name))
        exec(compile(script, "use_pytorch.py", "exec"), names)
    return names["losses"].tolist()  # type: ignore[no-any-return]


def launch(config: str) -> dict[str, Any]:
    """Train with accelerate's own launcher, in processes of their own; return what they print at the end.

    Raises:
        RuntimeError: with the last line of what was printed.
    """
    # of this process's launcher
    own = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
    kept = {k: v for k, v in os.environ.items() if k not in own and not k.startswith(("TORCHELASTIC_", "ROLE_"))}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "use_accelerate.yaml").write_text(config)
        Path(folder, "train.py").write_text(
            TRAIN.format(lr=LEARNING["optimizer.lr"], weight_decay=LEARNING["optimizer.weight_decay"])
        )
        command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"]
        command += ["--config_file", f"{folder}/use_accelerate.yaml", f"{folder}/train.py"]
        environment = {**kept, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150, check=False)
    if done.returncode:
        raise RuntimeError(f"accelerate ended with {done.returncode}: {(done.stderr.splitlines() or [''])[-1]}")
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def _expected(case: Setting, bench: Bench) -> str:
    return f"losses of the trial within {_tolerance(case, bench):g}"


def _tolerance(case: Setting, bench: Bench) -> float:
    if not bench.cuda:
        return CPU_FP32  # the same kernels in the same order
    return CUDA_FP32 if case.get("precision", "fp32") == "fp32" else HALF
