"""The function of `use=pytorch`, pasted into the benchmark's bare script, trains as the trial did."""

from __future__ import annotations

import ast
import os
import runpy
import tempfile
import textwrap
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from fsdp_lab.config import TrialConfig
from fsdp_lab.report.pytorch import to_pytorch
from fsdp_lab.training.layout import Layout
from tests.conftest import ROOT
from tests.ranks import Memo, config, run_ranks, selected
from tests.workloads.user import unusual

Case = tuple[str, ...]

TOLERANCE = 1e-5
MOST_LINES = 50  # of the function, without the operators that selective checkpointing keeps
SHARDINGS: dict[str, Case] = {
    "ddp": ("sharding=ddp",),
    "root": ("sharding=root",),
    "per_block": ("sharding=per_block",),
    "per_layer": ("sharding=per_layer",),
    "size_based": ("sharding=size_based", "sharding.min_num_params=10000"),
}
PRECISIONS = ("fp32", "bf16", "bf16_mixed", "fp16", "fp16_mixed", "grad_bf16")
TRIAL = ("model=vit_tiny", "data.num_train=null", "data.num_val=null", "training.global_batch_size=64",
         "training.max_steps=8")  # fmt: skip
CASES: dict[str, Case] = {
    "per_block": SHARDINGS["per_block"],
    "ddp, bf16, accumulation": (*SHARDINGS["ddp"], "precision=bf16", "training.grad_accum_steps=2"),
    "fp16, offload, clipping": (
        *SHARDINGS["per_block"], "precision=fp16", "precision.init_scale=2e6", "offload=cpu",
        "reshard_after_forward=always", "training.max_grad_norm=0.5", "optimizer=sgd", "optimizer.momentum=0.9",
    ),
    "root, accumulation, clipping": (
        *SHARDINGS["root"], "training.grad_accum_steps=4", "training.max_grad_norm=0.5", "optimizer=adamw",
        "reshard_after_forward=to_size", "reshard_after_forward.size=2", "optimizer.scale_lr=true",
    ),
    "per_layer, bf16_mixed, prefetch": (
        *SHARDINGS["per_layer"], "precision=bf16_mixed", "activation_checkpointing=full",
        "sharding.forward_prefetch=2", "sharding.backward_prefetch=1",
    ),
    "every second block, units of three": (
        *SHARDINGS["per_block"], "activation_checkpointing=every_n", "sharding.blocks_per_unit=3",
        "sharding.separate_reduce_scatter_group=true", "sharding.forward_prefetch=1",
    ),
    "gradients of each microbatch": (
        *SHARDINGS["size_based"], "training.grad_accum_steps=2", "training.sync_each_microbatch=true",
    ),
    "selective": (*SHARDINGS["per_block"], "activation_checkpointing=selective"),
    "compile": (*SHARDINGS["per_block"], "compile=true"),
    "own optimizer": (
        *SHARDINGS["per_block"], "optimizer._target_=torch.optim.RAdam", "optimizer.betas=[0.8,0.9]",
        "optimizer.scale_lr=true",
    ),
}  # fmt: skip
HYBRID = {
    "hybrid": (*SHARDINGS["per_block"], "sharding.dp_replicate=2", "reshard_after_forward=always"),
    "hybrid, replicas reduce once": (
        *SHARDINGS["root"], "sharding.dp_replicate=2", "training.grad_accum_steps=2",
        "training.sync_each_microbatch=true",
    ),
}  # fmt: skip


def trial_of(*words: str) -> TrialConfig:
    return config(*TRIAL, *words)


def train_and_paste(cases: list[Case]) -> list[dict[str, Any]]:
    """Train each case, paste its function and its step into the bare script, and train that on the same ranks."""
    import torch.distributed as dist

    from fsdp_lab.training.train import train

    results = []
    for words in cases:
        memo, losses = Memo(), list[float]()
        with tempfile.TemporaryDirectory() as own:
            train(trial_of(*words), Path(own), memo, losses.extend)
        layout, torch_version = Layout(**memo.known["layout"]), memo.known["torch"]
        code = to_pytorch("Trial 0", trial_of(*words), layout, dist.get_world_size(), torch_version)
        results.append({"code": code, "trial": losses, "bare": bare_losses(code, len(losses), trial_of(*words))})
    return results


def bare_losses(code: str, steps: int, trial: TrialConfig) -> list[float]:
    """Return the losses of the global batches, from `benchmarks/bare.py` with the pasted function and step."""
    import torch
    import torch.distributed as dist

    bare = runpy.run_path(str(ROOT / "benchmarks" / "bare.py"))
    pasted: dict[str, Any] = {}
    exec(compile(code, "use_pytorch.py", "exec"), pasted)
    losses: list[torch.Tensor] = []

    def compute_loss(model: Any, batch: Any) -> torch.Tensor:
        losses.append(bare["compute_loss"](model, batch))
        return losses[-1]

    once, step = (textwrap.dedent(part) for part in indented_parts(code))
    names: dict[str, Any] = {
        "torch": torch, "device": torch.device("cpu"), "parallelize": pasted["parallelize"],
        "model": bare["build_model"](), "compute_loss": compute_loss,
    }  # fmt: skip
    # the ranks have joined, and have no GPUs
    with mock.patch.object(dist, "init_process_group"), mock.patch.object(torch.cuda, "set_device") as device:
        exec(once, names)
    device.assert_called_once_with(int(os.environ["LOCAL_RANK"]))
    (images, labels), _ = bare["load_splits"]()
    accum = trial.training.grad_accum_steps
    loader = iter(bare["batches"](torch.utils.data.TensorDataset(images, labels), 0, accum))
    for _ in range(steps):
        names["microbatches"] = [next(loader) for _ in range(accum)]
        names["batch"] = names["microbatches"][0]
        exec(step, names)
    total = torch.stack(losses).detach().float().view(steps, accum).mean(1) / dist.get_world_size()
    dist.all_reduce(total)
    return total.tolist()


def indented_parts(code: str) -> tuple[str, str]:
    """Return the indented paragraphs of the docstring: what runs once, and what in each step."""
    docstring = code.split('"""')[1]
    once, step = (part for part in docstring.split("\n\n") if part.startswith("    "))
    return once, step


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    names = [name for name in selected(request, "name") if name in CASES]
    return dict(zip(names, run_ranks(2, train_and_paste, [CASES[name] for name in names])[0], strict=True))


def assert_same_losses(result: dict[str, Any]) -> None:
    assert len(result["trial"]) == 8
    assert result["bare"] == pytest.approx(result["trial"], abs=TOLERANCE), result["code"]


MARKS = {"compile": pytest.mark.full, "gradients of each microbatch": pytest.mark.full}


@pytest.mark.ci
@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in CASES])
def test_the_pasted_function_trains_as_the_trial(results: dict[str, dict[str, Any]], name: str) -> None:
    assert_same_losses(results[name])


@pytest.mark.ci
def test_every_sharding_and_precision() -> None:
    """DDP computes in each precision by other means than FSDP2, whose four shardings take turns."""
    ddp, *others = SHARDINGS.values()
    pairs = [(words, p) for n, p in enumerate(PRECISIONS) for words in (ddp, others[n % len(others)])]
    for result in run_ranks(2, train_and_paste, [(*words, f"precision={precision}") for words, precision in pairs])[0]:
        assert_same_losses(result)


@pytest.mark.ci
def test_hybrid_sharding_on_four_ranks() -> None:
    for result in run_ranks(4, train_and_paste, [*HYBRID.values()])[0]:
        assert_same_losses(result)


LAYOUT = Layout(units=["blocks.*"], blocks=["blocks.*"])


@pytest.mark.parametrize("name", [*CASES, *HYBRID])
def test_it_is_short_and_imports_only_pytorch(name: str) -> None:
    code = to_pytorch("Trial 0", trial_of(*(CASES | HYBRID)[name]), LAYOUT, 4, "2.15.0")
    tree = ast.parse(code)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {getattr(node, "module", None) or node.names[0].name for node in imports}  # type: ignore[attr-defined]
    assert {module.partition(".")[0] for module in modules} <= {"torch", "re", "functools"}
    bound = {(alias.asname or alias.name).partition(".")[0] for node in imports for alias in node.names}
    assert bound <= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    (function,) = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    kept = 22 if name == "selective" else 0
    assert function.end_lineno is not None and function.end_lineno - function.lineno < MOST_LINES + kept
    assert max(map(len, code.splitlines())) <= 120


@pytest.mark.parametrize(
    ("words", "before", "after"),
    [
        ("precision=float8 sharding=per_layer", "convert_to_float8_training(model", "fully_shard("),
        ("precision=tf32 sharding=ddp", 'torch.set_float32_matmul_precision("high")', "DistributedDataParallel("),
        ("lr_schedule=cosine", "Not included: lr_schedule=cosine.", "def parallelize(model):"),
    ],
)
def test_what_only_a_gpu_trains_or_the_user_adds_is_in_its_place(words: str, before: str, after: str) -> None:
    """Quotes in a title end no docstring."""
    code = to_pytorch('Trial 0: """ \\ model.path="x"', trial_of(*words.split()), LAYOUT, 4, "2.15.0")
    assert ast.get_docstring(ast.parse(code))
    assert 0 < code.index(before) < code.index(after)


@pytest.mark.parametrize("words", ["sharding=per_block", "sharding=ddp activation_checkpointing=full"])
def test_a_model_with_other_names_is_refused(words: str) -> None:
    """Without a unit the whole model would be gathered at once, in silence."""
    made: dict[str, Any] = {}
    exec(to_pytorch("Trial 0", trial_of(*words.split()), LAYOUT, 4, "2.15.0"), made)
    with pytest.raises(ValueError, match=r"no module's name matches is_(unit|block); use names of model"):
        made["parallelize"](torch.nn.Sequential(torch.nn.Linear(2, 2)))


def step_of_methods() -> list[int]:
    """On one rank: the sizes of the gradients after a step of the pasted function, of a model whose blocks encode."""
    words = ("sharding=per_block", "reshard_after_forward=always", "model.forward_methods=[encode]")
    code = to_pytorch("Trial 0", trial_of(*words), Layout(units=["blocks.*"]), 1, "2.15")
    pasted: dict[str, Any] = {}
    exec(compile(code, "use_pytorch.py", "exec"), pasted)
    made = unusual.methods()
    made.first.weight.data = made.first.weight.data.t()  # which fully_shard refuses
    model, _ = pasted["parallelize"](made)
    model(torch.ones(4, unusual.WIDTH)).sum().backward()
    return [p.grad.numel() for p in model.parameters()]


def test_methods_and_transposed_weights_are_in_the_function() -> None:
    assert run_ranks(1, step_of_methods)[0] == [p.numel() for p in unusual.methods().parameters()]


def compiled_graphs() -> list[int]:
    """How many graphs the blocks become that the function compiles, without and with checkpointing."""
    counts = []
    for mode in ("none", "full", "selective"):
        words = ("sharding=ddp", "compile=true", f"activation_checkpointing={mode}")
        layout = Layout(blocks=[r"encoder.layers.encoder_layer_*"])
        pasted: dict[str, Any] = {}
        exec(compile(to_pytorch("Trial 0", trial_of(*words), layout, 1, torch.__version__), "pasted", "exec"), pasted)
        graphs = list[Any]()

        def compile_block(block: Any, graphs: list[Any] = graphs) -> None:
            own = torch.compile(block._call_impl, backend=lambda graph, _: graphs.append(graph) or graph.forward)
            block._compiled_call_impl = own

        with mock.patch.object(torch.nn.Module, "compile", compile_block):
            model, _ = pasted["parallelize"](runpy.run_path(str(ROOT / "benchmarks" / "bare.py"))["build_model"]())
        model(torch.randn(2, 1, 28, 28))
        counts.append(len(graphs))
    return counts


def test_recomputed_blocks_of_the_function_are_compiled() -> None:
    (counts,) = run_ranks(1, compiled_graphs)
    assert counts[0] > 0 and counts == [counts[0]] * 3
