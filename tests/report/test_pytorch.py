"""The function of `use=pytorch`, pasted into the benchmark's bare script, trains as the trial did."""

from __future__ import annotations

import ast
import os
import re
import runpy
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from fsdp_lab.config import TrialConfig
from fsdp_lab.report.pytorch import to_pytorch
from fsdp_lab.training.groups import choose_groups
from fsdp_lab.training.layout import Layout, describe_layout
from fsdp_lab.training.optimizer import lr_factor
from fsdp_lab.workloads.build import build_task
from fsdp_lab.workloads.examples.language.llama import Block, Llama
from tests.conftest import ROOT
from tests.ranks import Memo, config, run_ranks, selected
from tests.training.saves import followed

TOLERANCE = 1e-5
TRIAL = ("model=vit_tiny", "data.num_train=null", "data.num_val=null", "training.global_batch_size=64",
         "training.max_steps=8")  # fmt: skip
SHARDINGS = ("sharding=root", "sharding=per_block", "sharding=per_layer",
             "sharding=size_based sharding.min_num_params=10000")  # fmt: skip
PRECISIONS = ("fp32", "bf16", "bf16_mixed", "bf16_pure", "fp16", "fp16_mixed", "grad_bf16")
ONE_CYCLE = "lr_schedule._target_=torch.optim.lr_scheduler.OneCycleLR lr_schedule.max_lr=0.01"
# DDP computes in each precision by other means than FSDP2, whose four shardings take turns.
OF_PRECISION = [f"{words} precision={precision}" for n, precision in enumerate(PRECISIONS)
                for words in ("sharding=ddp", SHARDINGS[n % 4])]  # fmt: skip
CASES = [
    *OF_PRECISION,
    "sharding=ddp precision=bf16 training.grad_accum_steps=2",
    "sharding=per_block precision=fp16 precision.init_scale=2e6 offload=cpu reshard_after_forward=always "
    "training.max_grad_norm=0.5 optimizer=sgd optimizer.momentum=0.9",
    "sharding=root training.grad_accum_steps=4 training.max_grad_norm=0.5 optimizer=adamw optimizer.scale_lr=true "
    "reshard_after_forward=to_size reshard_after_forward.size=2",
    "sharding=per_layer precision=bf16_mixed activation_checkpointing=full sharding.forward_prefetch=2 "
    "sharding.backward_prefetch=1",
    "sharding=per_block activation_checkpointing=every_n sharding.blocks_per_unit=3 "
    "sharding.separate_reduce_scatter_group=true sharding.forward_prefetch=1",
    "sharding=per_block activation_checkpointing=selective",
    "sharding=per_block activation_offload=cpu precision=bf16_mixed",
    "sharding=per_layer activation_offload=cpu activation_checkpointing=full",
    "sharding=per_block sharding.tp=2 activation_offload=cpu",
    # FSDP1 accumulates what it reduces later in the type of computation
    "sharding=per_block sharding.api=fsdp1 precision=bf16_mixed training.grad_accum_steps=2 training.max_grad_norm=0.5",
    "sharding=per_layer sharding.api=fsdp1 precision=fp16 precision.init_scale=2e6 offload=cpu "
    "sharding.forward_prefetch=1 sharding.backward_prefetch=0 reshard_after_forward=never training.max_grad_norm=0.5",
    "sharding=size_based sharding.min_num_params=10000 sharding.api=fsdp1 precision=grad_bf16 "
    "sharding.limit_all_gathers=false",
    "sharding=root sharding.api=fsdp1 activation_checkpointing=selective optimizer=adamw optimizer.scale_lr=true",
    "sharding=per_block sharding.embeddings=own sharding.blocks_per_unit=2 sharding.forward_prefetch=1",
    "sharding=per_block sharding.tp=2 training.max_grad_norm=0.5 activation_checkpointing=full",
    "sharding=per_block optimizer._target_=torch.optim.RAdam optimizer.betas=[0.8,0.9] optimizer.scale_lr=true",
    f"sharding=ddp optimizer=adamw optimizer.groups={__name__}.by_shape lr_schedule=cosine lr_schedule.warmup_steps=3",
    f"sharding=per_layer optimizer.decay=matrices optimizer.weight_decay=0.5 {ONE_CYCLE}",
    "sharding=root sharding.api=fsdp1 optimizer=adamw optimizer.decay=matrices lr_schedule.warmup_steps=5 "
    "optimizer.weight_decay=0.5",
    *(
        f"sharding={each} task.after_step={__name__}.shrinks"
        for each in ("ddp", "per_block", "root sharding.api=fsdp1")
    ),
    f"sharding=per_block optimizer._target_={__name__}.Named precision=fp16 precision.init_scale=2e6 {ONE_CYCLE}",
]
SLOW = [
    "sharding=size_based sharding.min_num_params=10000 training.grad_accum_steps=2 training.sync_each_microbatch=true",
    "sharding=per_block compile=true",
    "sharding=per_block sharding.api=fsdp1 compile=true training.grad_accum_steps=2 training.sync_each_microbatch=true",
]
COUNTED = f"task.loss={__name__}.some_classes"
COUNTING = [
    f"{COUNTED} sharding=ddp training.grad_accum_steps=2",
    f"{COUNTED} sharding=per_block training.max_grad_norm=0.5",
    f"{COUNTED} sharding=per_layer training.grad_accum_steps=4 offload=cpu training.max_grad_norm=0.5",
    f"{COUNTED} sharding=per_block sharding.api=fsdp1 training.grad_accum_steps=2",
]
HYBRID = [
    f"{COUNTED} sharding=root sharding.tp=2 training.grad_accum_steps=2",
    "sharding=per_block sharding.dp_replicate=2 reshard_after_forward=always",
    "sharding=per_block sharding.api=fsdp1 sharding.dp_replicate=2 reshard_after_forward=never",
    "sharding=root sharding.tp=2 training.grad_accum_steps=2 training.max_grad_norm=0.5 optimizer.scale_lr=true",
    "sharding=root sharding.dp_replicate=2 training.grad_accum_steps=2 training.sync_each_microbatch=true",
]
LAYOUT = Layout(units=["blocks.*"], blocks=["blocks.*"])
OWN = Layout(units=["embedding", "blocks.*"], blocks=["blocks.*"], last=["norm", "head"])


def by_shape(named: Any) -> list[dict[str, Any]]:
    matrices, others = [p for _, p in named if p.ndim >= 2], [p for _, p in named if p.ndim < 2]
    return [{"params": matrices, "lr": 0.005}, {"params": others, "weight_decay": 0.0}]


def shrinks(parts: Any, step: int) -> None:
    for parameter in parts["model"].parameters():
        parameter.mul_(1 - 0.01 * step)


class Named(torch.optim.AdamW):
    def __init__(self, named_parameters: Any, lr: float) -> None:
        groups: dict[bool, list[Any]] = {}
        for name, parameter in named_parameters:
            groups.setdefault("norm" in name, []).append(parameter)
        super().__init__([{"params": each, "lr": lr * (1 + slow)} for slow, each in groups.items()], lr=lr)


def trial_of(words: str) -> TrialConfig:
    return config(*TRIAL, *words.split())


def pasted(code: str, function: str = "parallelize") -> Any:
    """A function of a code."""
    return names_of(code)[function]


def names_of(code: str) -> dict[str, Any]:
    """What a code defines, compiled as a file of its user."""
    names: dict[str, Any] = {}
    exec(compile(code, "use_pytorch.py", "exec"), names)
    return names


def train_and_paste(cases: list[str]) -> list[dict[str, Any]]:
    """Train each case, paste its function and its step into the bare script, and train that on the same ranks."""
    import torch.distributed as dist

    from fsdp_lab.training.train import train

    results = []
    for words in cases:
        memo, losses = Memo(), list[float]()
        with tempfile.TemporaryDirectory() as own:
            train(trial_of(words), Path(own), memo, losses.extend)
        layout, torch_version = Layout(**memo.known["layout"]), memo.known["torch"]
        layout = replace(layout, counts="train/labels" in memo.reported[-1])
        trial, samples = trial_of(words), memo.known["data_num_train"]
        steps = samples // trial.training.global_batch_size
        code = to_pytorch(
            "Trial 0", trial, layout, dist.get_world_size(), torch_version, "", (), steps, memo.known["calls"]
        )
        results.append({"code": code, "trial": losses, "bare": bare_losses(code, len(losses), trial_of(words))})
    return results


def bare_losses(code: str, steps: int, trial: TrialConfig) -> list[float]:
    """Return the losses of the global batches, from `benchmarks/bare.py` with the pasted function and step."""
    import torch
    import torch.distributed as dist

    bare = runpy.run_path(str(ROOT / "benchmarks" / "bare.py"))
    losses: list[torch.Tensor] = []  # each with its number: a mean is one
    of_batch = some_classes if trial.task.loss else bare["compute_loss"]

    def compute_loss(model: Any, batch: Any) -> Any:
        loss = of_batch(model, batch)
        total, count = loss if isinstance(loss, tuple) else (loss, torch.tensor(1))
        losses.append(torch.stack([total.detach().float(), count]))
        return loss

    paragraphs = code.split('"""')[1].split("\n\n")  # two are indented: what runs once, and what in each step
    once, step = (textwrap.dedent(part) for part in paragraphs if part.startswith("    "))
    names: dict[str, Any] = {
        **names_of(code), "device": torch.device("cpu"), "model": bare["build_model"](), "compute_loss": compute_loss,
    }  # fmt: skip
    # the ranks have joined, and have no GPUs
    with mock.patch.object(dist, "init_process_group"), mock.patch.object(torch.cuda, "set_device") as device:
        exec(once, names)
    device.assert_called_once_with(int(os.environ["LOCAL_RANK"]))
    (images, labels), _ = bare["load_splits"]()
    accum = trial.training.grad_accum_steps
    tp = trial.sharding.tp
    of_parts = {"get_rank": dist.get_rank() // tp, "get_world_size": dist.get_world_size() // tp}
    with mock.patch.multiple(dist, **{name: mock.Mock(return_value=value) for name, value in of_parts.items()}):
        loader = iter(bare["batches"](torch.utils.data.TensorDataset(images, labels), 0, accum))
    for _ in range(steps):
        names["microbatches"] = [next(loader) for _ in range(accum)]
        names["batch"] = names["microbatches"][0]
        exec(step, names)
    total = torch.stack(losses).view(steps, accum, 2).sum(1)
    dist.all_reduce(total)
    return (total[:, 0] / total[:, 1].clamp(min=1)).tolist()


def some_classes(model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Of images only those below 5 count, which a part of a batch has any number of."""
    images, labels = batch
    labels = labels.where(labels < 5, -100)
    return torch.nn.functional.cross_entropy(model(images).float(), labels, reduction="sum"), (labels >= 0).sum()


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    words = selected(request, "words")
    on_two, on_four = ([each for each in words if each in some] for some in ((*CASES, *COUNTING, *SLOW), HYBRID))
    trained = run_ranks(2, train_and_paste, on_two)[0] + (run_ranks(4, train_and_paste, on_four)[0] if on_four else [])
    return dict(zip([*on_two, *on_four], trained, strict=True))


@pytest.mark.ci
@pytest.mark.parametrize(
    "words", [*CASES, *COUNTING, *HYBRID, *(pytest.param(words, marks=pytest.mark.full) for words in SLOW)]
)
def test_the_pasted_function_trains_as_the_trial(results: dict[str, dict[str, Any]], words: str) -> None:
    result = results[words]
    assert len(result["trial"]) == 8
    assert result["bare"] == pytest.approx(result["trial"], abs=TOLERANCE), result["code"]
    imported = re.findall(r"^ *(?:import|from) (\w+)", result["code"], re.MULTILINE)
    allowed = {"torch", "re", "functools", "math", "tests", "weakref", "collections", "typing"}
    assert {*imported} <= allowed, "the script is its user's: it has no fsdp_lab"


def test_the_pasted_hooks_move_what_the_trials_do() -> None:
    """Byte by byte: views, what changes in place, and what several operators save; weights and buffers stay."""
    code = to_pytorch("Trial 0", trial_of("sharding=ddp activation_offload=cpu"), LAYOUT, 2, "2.15")
    pasted_hooks = names_of(code)["offload_blocks"]
    ours = followed("cpu", "none")
    with mock.patch("fsdp_lab.training.blocks.offload_blocks", pasted_hooks):
        theirs = followed("cpu", "none")
    assert ours[1] == theirs[1] and all(torch.equal(a, b) for a, b in zip(ours[0], theirs[0], strict=True))


def train_language(*words: str) -> tuple[list[float], list[float], str]:
    """The losses of a pasted function and its step on two by two ranks, of one process, and the pasted code."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from fsdp_lab.training.parallel.tensor import apply_tensor_parallel

    sizes = {"vocab_size": 32, "dim": 16, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 24}
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Llama(**sizes, tied=True))  # type: ignore[arg-type]
    with torch.device("meta"):
        model = Llama(**sizes, tied=True)  # type: ignore[arg-type]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    divided = apply_tensor_parallel(model, Llama._tp_plan, mesh)
    layout = describe_layout(model, [*model.blocks], (Block,), divided=divided)
    code = to_pytorch("Trial 0", config(*" ".join(words).split()), layout, 4, "2.15.0")
    rows = torch.randint(32, (3, 4, 9), generator=torch.Generator().manual_seed(1))
    losses, expected = list[torch.Tensor](), list[float]()

    def next_token(model: Any, batch: torch.Tensor) -> torch.Tensor:
        logits = model(batch[:, :-1]).flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, batch[:, 1:].flatten())

    def compute_loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
        losses.append(next_token(model, batch))
        return losses[-1]

    once, step = (textwrap.dedent(part) for part in code.split('"""')[1].split("\n\n") if part.startswith("    "))
    names = {**names_of(code), "model": models[0], "compute_loss": compute_loss}
    with mock.patch.object(dist, "init_process_group"), mock.patch.object(torch.cuda, "set_device"):
        exec(once, names)
    plain = torch.optim.Adam(models[1].parameters(), lr=0.01)
    for batch in rows:
        exec(step, {**names, "batch": batch.chunk(2)[dist.get_rank() // 2]})
        loss = next_token(models[1], batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(models[1].parameters(), 0.5)
        plain.step()
        plain.zero_grad()
        expected.append(loss.item())
    total = torch.stack([loss.full_tensor() for loss in losses]).detach() / dist.get_world_size()  # type: ignore[operator]
    dist.all_reduce(total)
    return total.tolist(), expected, code


@pytest.mark.ci
@pytest.mark.parametrize(
    "more", ["", pytest.param("compile=true compile_loss=false", marks=pytest.mark.full)], ids=["eager", "compiled"]
)
def test_the_pasted_function_divides_layers_and_loss_as_the_trial(more: str) -> None:
    """On two by two ranks, which share embedding and head."""
    words = "task=language model=lm_tiny sharding=per_block sharding.tp=2 optimizer.lr=0.01 training.max_grad_norm=0.5"
    for got, expected, code in run_ranks(4, train_language, words, more):
        assert got == pytest.approx(expected, abs=TOLERANCE), code


@pytest.mark.parametrize(
    ("words", "before", "after"),
    [
        ("precision=float8 sharding=per_layer", "convert_to_float8_training(model", "fully_shard("),
        ("precision=tf32 sharding=ddp", 'torch.set_float32_matmul_precision("high")', "DistributedDataParallel("),
        # an overflow on one rank of a pair skips the step of both
        ("sharding=per_block sharding.tp=2 precision=fp16", "import ShardedGradScaler", "scaler = ShardedGradScaler("),
        ("lr_schedule=cosine", "Not included: lr_schedule=cosine.", "def parallelize(model):"),
        ("sharding=per_block", "parameter.data = parameter.data.contiguous()", "fully_shard(unit, **options)"),
        ("sharding=per_block sharding.embeddings=own", "fully_shard(unit, **options)",
         'fully_shard(last, **options | {"reshard_after_forward": False})'),
        ("sharding=per_block sharding.embeddings=own reshard_after_forward=never", "fully_shard(last, **options)",
         "fully_shard(model, **options)"),
        ("sharding=per_block model.forward_methods=[encode]", "if is_unit(name) and hasattr(module, method):",
         "register_fsdp_forward_method(module, method)"),
        ("activation_checkpointing=selective", "torch.ops.aten._scaled_mm.default", "saved = {"),  # a product
        # each recomputed block becomes one graph: torch.compile skips functools.partial(checkpoint, ...)
        ("compile=true activation_checkpointing=full", "return lambda *args, **kwargs: checkpoint(", "block.compile()"),
    ],
)  # fmt: skip
def test_what_the_bare_script_does_not_train_is_in_its_place(words: str, before: str, after: str) -> None:
    """Quotes in a title end no docstring."""
    layout = OWN if "embeddings=own" in words else LAYOUT
    code = to_pytorch('Trial 0: """ \\ model.path="x"', trial_of(words), layout, 4, "2.15.0")
    assert ast.get_docstring(ast.parse(code))
    assert 0 < code.index(before) < code.index(after)


@pytest.mark.parametrize(
    "words",
    ["lr_schedule=cosine lr_schedule.warmup_steps=3 lr_schedule.min_lr_ratio=0.1", "lr_schedule.warmup_steps=4",
     "lr_schedule=step lr_schedule.step_epochs=2 lr_schedule.gamma=0.5"],
)  # fmt: skip
def test_its_schedule_is_the_trials(words: str) -> None:
    trial = trial_of(f"{words} training.epochs=5")
    factor = pasted(to_pytorch("Trial 0", trial, LAYOUT, 2, "2.15.0", steps_per_epoch=4), "lr_factor")
    expected = [lr_factor(trial.lr_schedule, step, 4, 20) for step in range(24)]
    assert [factor(step) for step in range(24)] == pytest.approx(expected, abs=1e-12)


def test_its_groups_are_the_trials() -> None:
    """Of a model with an embedding, whose rate grows with the workers, as all others do."""
    words = "optimizer=adamw optimizer.decay=matrices optimizer.embedding_lr=0.1 optimizer.scale_lr=true"
    trial, model = trial_of(words), torch.nn.Sequential(torch.nn.Embedding(4, 2), torch.nn.Linear(2, 2))
    made = pasted(to_pytorch("Trial 0", trial, LAYOUT, 2, "2.15.0"), "parameter_groups")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = [([names[id(p)] for p in group.pop("params")], group) for group in made([*model.named_parameters()], model)]
    assert found == choose_groups(model, trial.optimizer, 2) == [
        (["0.weight"], {"lr": 0.2}), (["1.weight"], {}), (["1.bias"], {"weight_decay": 0.0}),
    ]  # fmt: skip


def test_what_the_trial_noted_is_in_its_docstring():
    noted = 'It looks for unused parameters (ValueError: """).'
    code = to_pytorch("Trial 0", trial_of("sharding=ddp"), LAYOUT, 4, "2.15.0", notes=[noted])
    assert "Note: It looks for unused parameters (ValueError: ''')." in (ast.get_docstring(ast.parse(code)) or "")


def test_the_allocator_of_the_trial_is_named():
    code = to_pytorch("Trial 0", trial_of("sharding=ddp"), LAYOUT, 4, "2.15.0", "expandable_segments:True")
    assert "once, with PYTORCH_ALLOC_CONF=expandable_segments:True in the environment:" in code
    assert "ALLOC_CONF" not in to_pytorch("Trial 0", trial_of("sharding=ddp"), LAYOUT, 4, "2.15.0")


@pytest.mark.parametrize("name", ["language", "seq2seq"])
def test_its_compiled_loss_is_the_tasks(name: str) -> None:
    trial = trial_of(f"task={name} compile=true")
    with mock.patch.object(torch, "compile", mock.Mock(side_effect=lambda function: function)) as compiled:
        code = to_pytorch("Trial 0", trial, LAYOUT, 4, "2.15.0")
        made = pasted(code, "cross_entropy")
    assert ", by the cross_entropy below" in code
    compiled.assert_called_once_with(made)
    labels, logits = torch.tensor([[3, 1, 2], [4, -1, -100]]), torch.randn(2, 3, 5)
    labels[labels < 0] = -1 if name == "language" else -100
    batch = torch.cat((labels[:, :1], labels), 1) if name == "language" else {"labels": labels}
    mean = build_task(trial.task, trial.model).loss(logits, batch).item()
    count = (labels >= 0).sum().item() if name == "seq2seq" else 1  # whose batches have any number of labels
    assert made(logits, labels).item() == pytest.approx(mean * count)


@pytest.mark.parametrize("words", ["sharding=per_block", "sharding=ddp activation_checkpointing=full"])
def test_a_model_with_other_names_is_refused(words: str) -> None:
    """Without a unit the whole model would be gathered at once, in silence."""
    parallelize = pasted(to_pytorch("Trial 0", trial_of(words), LAYOUT, 4, "2.15.0"))
    with pytest.raises(ValueError, match=r"no module's name matches is_(unit|block); use names of model"):
        parallelize(torch.nn.Sequential(torch.nn.Linear(2, 2)))


def test_it_is_written_without_pytorch():
    """Reports and nights write it, in processes that import no PyTorch."""
    code = (
        "import sys; from fsdp_lab.config import TrialConfig; from fsdp_lab.report.pytorch import to_pytorch; "
        "from fsdp_lab.training.layout import Layout; "
        "assert 'def parallelize' in to_pytorch('t', TrialConfig(), Layout(), 2, '2.13'); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
