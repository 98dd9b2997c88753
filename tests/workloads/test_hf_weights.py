"""What a trial exports is what transformers reads, and what transformers writes is what a trial starts from."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import transformers
from safetensors.torch import save_file

from fsdp_lab.config import UserError
from fsdp_lab.config.rules import check_files, check_trial
from tests.ranks import Memo, config, run_ranks, selected
from tests.workloads.hf.cases import CONFIGS, LEARN, WORDS, plain_model, script

SHARDINGS = ("ddp", "root", "per_block")
READ = [("gpt2", "root"), ("t5", "per_block"), ("t5", "ddp"), ("vit", "ddp"), ("llama", "per_block")]
EXPORTED = list(zip(WORDS, itertools.cycle(SHARDINGS), strict=False))
OTHERS = [(name, sharding) for name in WORDS for sharding in SHARDINGS if (name, sharding) not in EXPORTED]
AUTO: dict[str, Any] = {"t5": transformers.AutoModelForSeq2SeqLM, "vit": transformers.AutoModelForImageClassification}


def from_folder(name: str, folder: Path) -> list[str]:
    """What is typed to start from its weights."""
    return [*WORDS[name], f"model.config={folder}", "model.pretrained=true"]


def check(name: str, folder: Path, *words: str) -> None:
    trial = config(*from_folder(name, folder), *words)
    check_trial(trial, 2)
    check_files(trial)


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


@pytest.fixture(scope="module")
def exported(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[tuple[str, str], float]]:
    """The folder of the exports, and the loss of each whose test runs; in one group of processes."""
    folder = tmp_path_factory.mktemp("exported")
    return folder, run_ranks(2, export_all, selected(request, "cell"), str(folder))[0]


@pytest.mark.ci
@pytest.mark.parametrize("cell", [*EXPORTED, *(pytest.param(cell, marks=pytest.mark.full) for cell in OTHERS)])
def test_from_pretrained_reads_what_a_trial_exported(
    exported: tuple[Path, dict[tuple[str, str], float]], cell: tuple[str, str]
) -> None:
    """It tells the validation split with the loss that was measured at the trial's end."""
    (name, sharding), (folder, losses) = cell, exported
    trial, plain = config(*WORDS[name]), script(name)
    split = plain.split("val")
    batch = torch.utils.data.default_collate([split[i] for i in range(trial.data.num_val or len(split))])
    own = folder / f"{name}_{sharding}"
    assert not list(own.glob(".*")) and not (own / "model.pt").exists()
    assert {"config.json", "model.safetensors", "fsdp_lab.json"} <= {path.name for path in (own / "model").iterdir()}
    assert json.loads((own / "model" / "fsdp_lab.json").read_text())["step"] == 2
    auto = AUTO.get(name, transformers.AutoModelForCausalLM)
    with torch.no_grad():
        loss = plain.loss(auto.from_pretrained(own / "model", dtype=torch.float32).eval(), batch).item()
    assert loss == pytest.approx(losses[cell], abs=1e-6)


def shards_of_gpt2(folder: Path) -> Any:
    """As the published ones: those of the base model alone, whose names lack its name; in several files here."""
    model: Any = plain_model("gpt2")
    model.transformer.save_pretrained(folder, max_shard_size="30KB")
    assert (folder / "model.safetensors.index.json").is_file()
    return model


def whole(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    model: Any = plain_model(name).to(dtype)
    model.save_pretrained(folder)
    return model


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


@pytest.mark.ci
def test_ranks_read_what_transformers_wrote_to_the_bit(tmp_path: Path) -> None:
    """GPT-2 in several files, T5 with its three tied tables, ViT by the names of its publication, and Llama, which is
    in bfloat16 there and in float32 here."""
    torch.manual_seed(3)  # not the seed of a trial
    models = {"gpt2": shards_of_gpt2(tmp_path / "gpt2")}
    models |= {name: whole(name, tmp_path / name) for name in ("t5", "vit")}
    models["llama"] = whole("llama", tmp_path / "llama", torch.bfloat16)
    for name in models:
        check(name, tmp_path / name)
    words = [[*from_folder(name, tmp_path / name), f"sharding={sharding}"] for name, sharding in READ]
    for (name, sharding), got in zip(READ, run_ranks(2, first_weights, words)[0], strict=True):
        expected = models[name].state_dict()
        assert got.keys() == expected.keys(), (name, sharding)
        assert all(torch.equal(got[key], expected[key].float()) for key in expected), (name, sharding)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("model.n_layer=3", r"12 missing \(transformer.h.2.ln_1.weight, .*, \.\.\.\)\. Remove the overrides"),
        ("model.n_layer=1", r"11 unknown to the model \(transformer.h.1.attn.c_attn.weight, "),
        ("model.n_embd=16", r"28 of another shape \(.* is \[96\] there and \[48\] in the model"),
    ],
)
def test_weights_of_another_size_are_refused(tmp_path: Path, words: str, message: str) -> None:
    whole("gpt2", tmp_path)
    check("gpt2", tmp_path)
    with pytest.raises(UserError, match=message):
        check("gpt2", tmp_path, words)


def test_damaged_and_missing_files_and_pickles_are_refused(tmp_path: Path) -> None:
    def refused(folder: Path, message: str) -> None:
        with pytest.raises(UserError, match=message):
            check("gpt2", folder)

    whole("gpt2", tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    refused(tmp_path, r"model\.safetensors is not a complete \.safetensors file .*; download it again")
    shards = tmp_path / "shards"
    shards_of_gpt2(shards)
    (shards / "model-00002-of-00006.safetensors").unlink()
    refused(shards, r"missing \(.*h\.0\..*\)\. .* download all parts of the model")
    pickles = tmp_path / "pickles"
    pickles.mkdir()
    (pickles / "config.json").write_text((CONFIGS / "gpt2.json").read_text())
    refused(pickles, r"has no model\.safetensors, nor parts of it")
    torch.save({}, pickles / "pytorch_model.bin")
    refused(pickles, r"Pickles \(\.bin\) are not read.*save_pretrained")


@pytest.mark.parametrize("other", ["aa_old", "zz_old"])
def test_a_tensor_in_two_files_of_the_folder_is_refused(tmp_path: Path, other: str) -> None:
    model = shards_of_gpt2(tmp_path)
    save_file({"another.name": torch.zeros(1)}, tmp_path / "extra.safetensors")
    check("gpt2", tmp_path)
    save_file({"wte.weight": torch.zeros_like(model.transformer.wte.weight)}, tmp_path / f"{other}.safetensors")
    with pytest.raises(UserError, match=rf"has wte\.weight in .*{other}\.safetensors.*; remove"):
        check("gpt2", tmp_path)
