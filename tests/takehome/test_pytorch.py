"""The script of a trial in plain PyTorch gives the trial's losses."""

from __future__ import annotations

import ast
import math
import re
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from fsdp_lab.config import UserError
from fsdp_lab.config.registry import REGISTRY
from fsdp_lab.layout import Layout
from fsdp_lab.takehome import Setup, to_pytorch
from fsdp_lab.takehome.imports import Imports
from tests.conftest import ROOT
from tests.parity import WORKLOADS
from tests.ranks import config, run_ranks, selected
from tests.takehome.scripts import PRECISIONS, SHARDINGS, VIT, train_and_run
from tests.workloads.user.test_training import DATA, FITS, HERE, LOSS, NET

Case = tuple[str, ...]

TOLERANCE = 1e-5  # measured: 0
MOST_LINES = 68  # of at most 120 characters; two of them end the process
RULE_LINES = 17  # of the operators that selective checkpointing keeps
MLP = ("model=mlp", "optimizer=sgd", "optimizer.momentum=0.9")
LM = ("task=language", "model=lm_tiny", "data=pydoc", "data.seq_len=32", "data.num_train=128", "data.num_val=30")
FULL = "activation_checkpointing=full"
# Each sharding, each precision and each feature once.
CASES: dict[str, Case] = {
    "per_block": (*SHARDINGS["per_block"], *VIT, "training.epochs=2", "training.seed=3"),
    "fp16, offload, schedule": (
        *SHARDINGS["per_block"], "precision=fp16", "precision.init_scale=2e6", "offload=cpu", "lr_schedule=cosine",
        "lr_schedule.warmup_steps=2", "reshard_after_forward=always", "training.epochs=2", *MLP,
    ),
    "root, bf16, max_steps": (*SHARDINGS["root"], "precision=bf16", "training.epochs=2", "training.max_steps=6", *MLP),
    "per_layer, bf16_mixed, prefetch": (
        *SHARDINGS["per_layer"], "precision=bf16_mixed", FULL, "sharding.forward_prefetch=2",
        "sharding.backward_prefetch=1", *VIT,
    ),
    "size_based, grad_bf16": (*SHARDINGS["size_based"], "precision=grad_bf16", "optimizer=adamw", *VIT[1:]),
    "ddp, bf16, accumulation": (*SHARDINGS["ddp"], "precision=bf16", "training.grad_accum_steps=2", *VIT),
    "ddp, fp16_mixed": (*SHARDINGS["ddp"], "precision=fp16_mixed", FULL, *VIT),
    "language": (
        *SHARDINGS["per_block"], *LM, FULL, "training.max_grad_norm=0.5", "training.grad_accum_steps=2",
        "lr_schedule=step", "reshard_after_forward=to_size", "reshard_after_forward.size=2", "optimizer.scale_lr=true",
    ),
    "every second block, units of three": (
        *SHARDINGS["per_block"], "activation_checkpointing=every_n", "sharding.blocks_per_unit=3",
        "sharding.separate_reduce_scatter_group=true", *VIT,
    ),
    "gradients of each microbatch": (
        *SHARDINGS["per_block"], "training.grad_accum_steps=2", "training.sync_each_microbatch=true", *VIT,
    ),
    "selective": (*SHARDINGS["per_block"], *LM, "activation_checkpointing=selective"),
    "loss in chunks": (*SHARDINGS["root"], *LM, "task.loss_chunks=2", "model.tied=true"),
    "user's loss in bfloat16": (
        "model=mlp", f"task.loss={HERE}.net.labels", *SHARDINGS["per_block"], "precision=bf16",
        "training.grad_accum_steps=2",
    ),
    # of rows that differ in their labels; and T5, whose embedding is shared by encoder, decoder and head
    "seq2seq": (*WORKLOADS["seq2seq"].words, *SHARDINGS["ddp"], "training.grad_accum_steps=2", *VIT),
    "t5": (*WORKLOADS["t5_tiny"].words, *SHARDINGS["per_block"], "training.grad_accum_steps=2"),
    **{f"user's {name}": (*overrides, "data.num_train=96") for name, (overrides, _) in FITS.items()},
}  # fmt: skip
MARKS = {  # of whose lines other cases have most
    "gradients of each microbatch": pytest.mark.ci,
    "loss in chunks": pytest.mark.ci,
    "t5": pytest.mark.full,
    **{f"user's {name}": pytest.mark.full for name in FITS if name != "all three"},
}
NAMES = [pytest.param(name, marks=MARKS[name]) if name in MARKS else name for name in CASES]
EVERYTHING: Case = (
    *NET, *DATA, *LOSS, *SHARDINGS["per_layer"], "sharding.dp_replicate=2", "precision=fp16", "offload=cpu", FULL,
    "reshard_after_forward=to_size", "reshard_after_forward.size=1", "sharding.forward_prefetch=1",
    "sharding.backward_prefetch=1", "training.grad_accum_steps=2", "training.max_grad_norm=0.1", "lr_schedule=cosine",
    "lr_schedule.warmup_steps=2", "lr_schedule.min_lr_ratio=0.1", "training.epochs=2",
)  # fmt: skip


def assert_same_losses(result: dict[str, Any]) -> None:
    script, trial = result["last"], result["trial"]
    assert trial[-len(script) :] == pytest.approx(script, abs=TOLERANCE), result["script"]
    printed = [float(text) for text in re.findall(r"^epoch \d+: train/loss (\S+)$", result["printed"], re.MULTILINE)]
    assert printed == pytest.approx(result["epochs"], abs=TOLERANCE)
    assert result["left"], "it ends before a thread of gloo's can abort Python"


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    names = selected(request, "name") or [*CASES]
    return dict(zip(names, run_ranks(2, train_and_run, [list(CASES[name]) for name in names])[0], strict=True))


@pytest.mark.ci
@pytest.mark.parametrize("name", NAMES)
def test_the_script_gives_the_losses_of_the_trial(results: dict[str, dict[str, Any]], name: str) -> None:
    assert_same_losses(results[name])
    longest = MOST_LINES + (RULE_LINES if "activation_checkpointing=selective" in CASES[name] else 0)
    assert len(results[name]["script"].splitlines()) <= longest


@pytest.mark.ci
@pytest.mark.parametrize("name", ["fp16, offload, schedule"])
def test_a_step_that_overflows_is_skipped_as_in_the_trial(results: dict[str, dict[str, Any]], name: str) -> None:
    result = results[name]
    assert 0 < result["skipped"] < 8, "some steps of the trial, not all"
    assert all(map(math.isfinite, result["last"]))


@pytest.mark.parametrize("name", ["user's all three"])
def test_the_sharding_imports_nothing_of_ours(results: dict[str, dict[str, Any]], name: str) -> None:
    for result in results.values():
        tree = ast.parse(result["script"])
        modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        ours = {module for module in modules if module.startswith("fsdp_lab")}
        assert all(module.startswith(("fsdp_lab.workloads", "fsdp_lab.config.workload")) for module in ours)
    modules = [node for node in ast.walk(ast.parse(results[name]["script"])) if hasattr(node, "module")]
    assert not [node.module for node in modules if node.module.startswith("fsdp_lab")]


@pytest.mark.full
def test_every_sharding_in_every_precision() -> None:
    cases = [(*SHARDINGS[s], f"precision={p}", *VIT) for s, p in product(SHARDINGS, ("fp32", *PRECISIONS))]
    for result in run_ranks(2, train_and_run, [list(case) for case in cases])[0]:
        assert_same_losses(result)


@pytest.mark.ci
def test_four_ranks() -> None:
    hybrid = (*SHARDINGS["per_block"], "sharding.dp_replicate=2", "reshard_after_forward=always", *VIT)
    each = (*hybrid, "training.grad_accum_steps=2", "training.sync_each_microbatch=true")
    results = run_ranks(4, train_and_run, [list(hybrid), list(EVERYTHING), list(each)])[0]
    for result in results:
        assert_same_losses(result)
    assert "model.set_requires_all_reduce(i == 2)" in results[2]["script"]


@pytest.mark.ci
@pytest.mark.parametrize("name", ["user's all three"])
def test_torchrun_runs_the_file(results: dict[str, dict[str, Any]], tmp_path: Path, name: str) -> None:
    (tmp_path / "use_pytorch.py").write_text(results[name]["script"])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "use_pytorch.py"]
    environment = {"PATH": "", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == results[name]["printed"]


def setup_of(case: Case, **layout: Any) -> Setup:
    return Setup("Trial 0", config(*case), Layout(**layout), 4, 1000, 128, "2.15.0", 1, {})


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("compile=true", "compile_memory_budget=0.5"), "torch._functorch.config.activation_memory_budget = 0.5"),
        (("precision=float8", "sharding=per_layer"), 'convert_to_float8_training(model, config=Float8LinearConfig'
         '.from_recipe_name("rowwise"), module_filter_fn=converted)'),
    ],
)  # fmt: skip
def test_what_no_cpu_can_compare_is_in_the_script(words: Case, line: str) -> None:
    blocks = ["my.net:Block"]
    script = to_pytorch(setup_of((*VIT, *words), units=["blocks.*"], unit_classes=blocks, block_classes=blocks))
    lines = script.splitlines()
    assert line in lines
    assert "convert" not in line or lines.index(line) < [text.startswith("units = ") for text in lines].index(True)
    names = {node.id for node in ast.walk(ast.parse(script)) if isinstance(node, ast.Name)}
    assert "Block" in names


@pytest.mark.parametrize("case", [*CASES.values(), EVERYTHING], ids=[*CASES, "everything"])
def test_no_line_is_long_and_no_import_unused(case: Case) -> None:
    blocks = ["my.net:Block"]
    script = to_pytorch(setup_of(case, units=["blocks.*"], unit_classes=blocks, block_classes=blocks))
    assert max(map(len, script.splitlines())) <= 120
    tree = ast.parse(script)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    bound = {(alias.asname or alias.name).partition(".")[0] for node in imports for alias in node.names}
    assert bound <= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def test_the_process_group_of_a_script_is_bound_to_its_gpu() -> None:
    tree = ast.parse(to_pytorch(setup_of(MLP)))
    (call,) = (
        node for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "dist.init_process_group"
    )  # fmt: skip
    assert {k.arg: ast.unparse(k.value) for k in call.keywords} == {"device_id": "device if cuda else None"}
    assert ast.unparse(call.args[0]) == "'nccl' if cuda else 'gloo'"
    assert '"cpu:gloo,cuda:nccl" if cuda else "gloo"' in to_pytorch(setup_of((*MLP, "offload=cpu")))


def test_blocks_that_no_script_can_import_are_found_by_their_names() -> None:
    local = ["my.net:make.<locals>.Block"]
    script = to_pytorch(setup_of((*MLP,), units=["blocks.*"], unit_classes=local, block_classes=local))
    assert "type(m).__name__ in ('Block',)" in script and "<locals>" not in script


def test_a_task_of_another_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REGISTRY["task.name"], "theirs", "their.task")
    setup = setup_of(MLP)
    setup.config.task.name = "theirs"
    with pytest.raises(UserError, match="task=theirs is another package's"):
        to_pytorch(setup)


def test_passwords_are_not_written() -> None:
    setup = setup_of((*NET, *LOSS, f"data._target_={HERE}.data.Corpus", "data.noise=s3://me:secret@there/x"))
    assert "secret" not in to_pytorch(setup)


@pytest.mark.parametrize(
    ("path", "expression", "line"),
    [
        ("my.net.Net", "Net", "from my.net import Net"),
        ("my.net.loss", "loss_", "from my.net import loss as loss_"),
        ("my.net.Net.make", "Net.make", "from my.net import Net"),
        ("My.net:Net.make", "Net.make", "from My.net import Net"),
    ],
)
def test_paths_become_imports(path: str, expression: str, line: str) -> None:
    imports = Imports()
    assert imports.path(path) == expression
    assert imports.lines() == [line]


def test_objects_among_arguments_are_made() -> None:
    imports = Imports()
    inner = {"_target_": "my.net.Rule", "sizes": [1, {"_target_": "my.net.Two"}], "text": "a"}
    assert imports.call("my.net.Net", {"rule": inner, "plain": {"a": None}}) == (
        "Net(rule=Rule(sizes=[1, Two()], text='a'), plain={'a': None})"
    )
    assert imports.lines() == ["from my.net import Net, Rule, Two"]


def test_an_argument_is_a_name_and_no_code() -> None:
    with pytest.raises(UserError, match="is not the name of an argument"):
        Imports().call("my.net.Net", {"a=print(1), b": 2})


def test_two_things_of_one_name_get_two_names() -> None:
    imports = Imports()
    assert [imports.path("a.Net"), imports.path("b.Net"), imports.path("a.Net")] == ["Net", "Net_", "Net"]
