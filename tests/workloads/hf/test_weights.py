"""What a trial exports is what transformers reads, and what transformers writes is what a trial starts from."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from safetensors.torch import save_file

from fsdp_lab.config import UserError
from fsdp_lab.config.rules import check_files, check_trial
from tests.ranks import Memo, config, run_ranks, selected
from tests.workloads.hf.cases import CONFIGS, LEARN, WORDS, plain_model, script

SHARDINGS = ("ddp", "root", "per_block")
READ = [*((name, sharding) for name in ("gpt2", "t5", "vit") for sharding in SHARDINGS), ("llama", "per_block")]
EXPORTED = list(zip(WORDS, itertools.cycle(SHARDINGS), strict=False))
OTHERS = [(name, sharding) for name in WORDS for sharding in SHARDINGS if (name, sharding) not in EXPORTED]
# Each epoch's learning rate is 50 times the last one's, so that the first epoch is the best.
WORSE = [
    "training.epochs=2", "data.num_train=64", "lr_schedule=step", "lr_schedule.gamma=50", "optimizer.lr=0.01",
    "checkpoint.mode=sync", "export=true",
]  # fmt: skip
AUTO = {"t5": "AutoModelForSeq2SeqLM", "vit": "AutoModelForImageClassification"}


def read_back(name: str, folder: Path) -> Any:
    import transformers

    return getattr(transformers, AUTO.get(name, "AutoModelForCausalLM")).from_pretrained(folder, dtype=torch.float32)


def from_folder(name: str, folder: Path) -> list[str]:
    """What is typed to start from its weights."""
    return [*WORDS[name], f"model.config={folder}", "model.pretrained=true"]


def export_all(cells: Sequence[tuple[str, str]], folder: str) -> dict[tuple[str, str], float]:
    """On each rank: train every model in its shardings. Return the loss of its validation."""
    from fsdp_lab.training.train import train

    losses = {}
    for name, sharding in cells:
        memo, own = Memo(), Path(folder, f"{name}_{sharding}")
        own.mkdir(exist_ok=True)
        words = ("export=true", "training.max_steps=2", f"sharding={sharding}")
        train(config(*WORDS[name], *LEARN, *words), own, memo)
        losses[name, sharding] = memo.reported[-1]["val/loss"]
    return losses


def best_and_last(folder: str) -> dict[str, int]:
    """On each rank: export the best epoch, then in another trial the last. Return the step of each."""
    from fsdp_lab.training.train import train

    steps = {}
    for name in ("best", "last"):
        memo, own = Memo(), Path(folder, name)
        own.mkdir(exist_ok=True)
        train(config(*WORDS["gpt2"], *WORSE, f"checkpoint.export_best={str(name == 'best').lower()}"), own, memo)
        lowest = min(memo.reported, key=lambda epoch: epoch["val/loss"])
        steps[name] = int((lowest if name == "best" else memo.reported[-1])["step"])
    return steps


def first_weights(cases: list[list[str]]) -> list[dict[str, Tensor]]:
    """On each rank: the whole first weights of each case."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    from fsdp_lab.training.build import build
    from fsdp_lab.training.distributed import build_parallel_dims, setup_distributed
    from fsdp_lab.training.weights import init_weights
    from fsdp_lab.workloads.build import build_model_spec

    ranks, results = setup_distributed(), []
    for words in cases:
        trial = config(*words)
        spec, dims = build_model_spec(trial.model), build_parallel_dims(trial.sharding, ranks)
        init = partial(init_weights, config=trial, device=ranks.device, load=spec.load_weights)
        state = build(spec, trial, dims, ranks.device, materialize=init)
        full = get_model_state_dict(state.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        results.append(dict(full))
    return results


@dataclass(frozen=True)
class OnRanks:
    """What two ranks did: the folder of their exports, and what each function returned."""

    folder: Path
    losses: dict[tuple[str, str], float]
    weights: list[dict[str, Tensor]]


def do_both(cells: Sequence[tuple[str, str]], folder: str, words: list[list[str]]) -> tuple[Any, ...]:
    return export_all(cells, folder), first_weights(words)


@pytest.fixture(scope="module")
def on_ranks(
    request: pytest.FixtureRequest, written: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> OnRanks:
    """In one group of processes; of the exports only those whose tests run."""
    cells = selected(request, "cell")
    folder = tmp_path_factory.mktemp("exported")
    words = [[*from_folder(name, written[name][0]), f"sharding={sharding}"] for name, sharding in READ]
    return OnRanks(folder, *run_ranks(2, do_both, cells, str(folder), words)[0])


@pytest.mark.ci
@pytest.mark.parametrize("cell", [*EXPORTED, *(pytest.param(cell, marks=pytest.mark.full) for cell in OTHERS)])
def test_from_pretrained_reads_what_a_trial_exported(on_ranks: OnRanks, cell: tuple[str, str]) -> None:
    """It tells the validation split with the loss that was measured at the trial's end."""
    name, sharding = cell
    trial, plain = config(*WORDS[name]), script(name)
    split = plain.split("val")
    batch = torch.utils.data.default_collate([split[i] for i in range(trial.data.num_val or len(split))])
    own = on_ranks.folder / f"{name}_{sharding}"
    assert not list(own.glob(".*")) and not (own / "model.pt").exists()
    assert {"config.json", "model.safetensors", "fsdp_lab.json"} <= {path.name for path in (own / "model").iterdir()}
    with torch.no_grad():
        loss = plain.loss(read_back(name, own / "model").eval(), batch).item()
    assert loss == pytest.approx(on_ranks.losses[cell], abs=1e-6)


@pytest.mark.ci
def test_the_exported_folder_says_the_step_of_its_weights(tmp_path: Path) -> None:
    (steps,) = run_ranks(1, best_and_last, str(tmp_path))
    files = {name: tmp_path / name / "model" / "fsdp_lab.json" for name in steps}
    assert {name: json.loads(file.read_text())["step"] for name, file in files.items()} == steps
    assert steps["best"] < steps["last"]


def shards_of_gpt2(folder: Path) -> Any:
    """As the published ones: those of the base model alone, whose names lack its name; in several files here."""
    model = plain_model("gpt2")
    model.transformer.save_pretrained(folder, max_shard_size="30KB")  # type: ignore[union-attr,operator]
    assert (folder / "model.safetensors.index.json").is_file()
    return model


def whole(name: str, folder: Path) -> Any:
    model = plain_model(name)
    model.save_pretrained(folder)  # type: ignore[operator]
    return model


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """By transformers: GPT-2 in several files, T5 with its three tied tables, ViT by the names of its publication, and
    Llama in bfloat16. Name -> folder and model."""
    folder = tmp_path_factory.mktemp("written")
    torch.manual_seed(3)  # not the seed of a trial
    models: dict[str, Any] = {"gpt2": shards_of_gpt2(folder / "gpt2")}
    models |= {name: whole(name, folder / name) for name in ("t5", "vit")}
    models["llama"] = plain_model("llama").to(torch.bfloat16)
    models["llama"].save_pretrained(folder / "llama")
    return {name: (folder / name, model) for name, model in models.items()}


@pytest.mark.ci
def test_ranks_read_what_transformers_wrote_to_the_bit(written: dict[str, Any], on_ranks: OnRanks) -> None:
    """What is in bfloat16 into float32."""
    for (name, sharding), got in zip(READ, on_ranks.weights, strict=True):
        folder, model = written[name]
        check(name, folder)
        expected = model.state_dict()
        assert got.keys() == expected.keys(), (name, sharding)
        assert all(torch.equal(got[key], expected[key].float()) for key in expected), (name, sharding)


def check(name: str, folder: Path, *words: str) -> None:
    trial = config(*from_folder(name, folder), *words)
    check_trial(trial, 2)
    check_files(trial)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.n_layer=3"], r"12 missing \(transformer.h.2.ln_1.weight, .*, \.\.\.\)\. Remove the overrides"),
        (["model.n_layer=1"], r"11 unknown to the model \(transformer.h.1.attn.c_attn.weight, "),
        (["model.n_embd=16"], r"28 of another shape \(.* is \[96\] there and \[48\] in the model"),
    ],
)
def test_weights_of_another_size_are_refused(tmp_path: Path, words: list[str], message: str) -> None:
    whole("gpt2", tmp_path)
    check("gpt2", tmp_path)
    with pytest.raises(UserError, match=message):
        check("gpt2", tmp_path, *words)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    whole("gpt2", tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(
        UserError, match=r"model\.safetensors is not a complete \.safetensors file .*; download it again"
    ):
        check("gpt2", tmp_path)
    shards = tmp_path / "shards"
    shards_of_gpt2(shards)
    (shards / "model-00002-of-00006.safetensors").unlink()
    with pytest.raises(UserError, match=r"missing \(.*h\.0\..*\)\. .* download all parts of the model"):
        check("gpt2", shards)


@pytest.mark.parametrize("other", ["aa_old", "model", "zz_old"])
def test_a_tensor_in_two_files_of_the_folder_is_refused(tmp_path: Path, other: str) -> None:
    model = shards_of_gpt2(tmp_path)
    check("gpt2", tmp_path)
    file = tmp_path / f"{other}.safetensors"
    save_file({"another.name": torch.zeros(1)}, tmp_path / "extra.safetensors")
    check("gpt2", tmp_path)
    save_file({"wte.weight": torch.zeros_like(model.transformer.wte.weight)}, file)
    with pytest.raises(UserError, match=r"has wte\.weight in .*\.safetensors and .*\.safetensors; remove") as raised:
        check("gpt2", tmp_path)
    assert file.name in str(raised.value)


def test_pickles_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((CONFIGS / "gpt2.json").read_text())
    with pytest.raises(UserError, match=r"has no model\.safetensors, nor parts of it"):
        check("gpt2", tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"Pickles \(\.bin\) are not read.*save_pretrained"):
        check("gpt2", tmp_path)
