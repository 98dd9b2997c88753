"""What a trial exports is what transformers reads, and what transformers writes is what a trial starts from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from safetensors.torch import load_file, save_file

from fsdp_lab.config import UserError
from fsdp_lab.config.rules import check_files, check_trial
from tests.ranks import Memo, config, run_ranks
from tests.workloads.hf.cases import CONFIGS, LEARN, WORDS, plain_model, script

READ = [("gpt2", "root"), ("t5", "per_block"), ("t5", "ddp"), ("vit", "ddp"), ("llama", "per_block")]
PURE = ("llama", "root")  # which is in bfloat16, and stays so
EXPORTED = [("gpt2", "ddp"), ("llama", "root"), ("qwen3", "per_block"), ("t5", "ddp"), ("vit", "root")]


def from_folder(name: str, folder: Path) -> list[str]:
    """What is typed to start from its weights."""
    return [*WORDS[name], f"model.config={folder}", "model.pretrained=true"]


def check(name: str, folder: Path, *words: str) -> None:
    trial = config(*from_folder(name, folder), *words)
    check_trial(trial, 2)
    check_files(trial)


def export_all(cells: Sequence[tuple[str, str]], words: list[list[str]], folder: str) -> list[float]:
    """On each rank: train every model in its sharding, and return the loss of its last validation."""
    from fsdp_lab.training.train import train

    losses = []
    for (name, sharding), of_cell in zip(cells, words, strict=True):
        memo, own = Memo(), Path(folder, f"{name}_{sharding}")
        own.mkdir(exist_ok=True)
        train(config(*of_cell, "export=true", f"sharding={sharding}"), own, memo)
        losses.append(memo.reported[-1]["val/loss"])
    return losses


def read_by_transformers(name: str, folder: Path) -> Any:
    auto = {"t5": transformers.AutoModelForSeq2SeqLM, "vit": transformers.AutoModelForImageClassification}
    return auto.get(name, transformers.AutoModelForCausalLM).from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.ci
def test_from_pretrained_reads_what_a_trial_exported(tmp_path: Path) -> None:
    """It tells the validation split with the loss that was measured at the trial's end."""
    words = [[*WORDS[name], *LEARN, "training.max_steps=2"] for name, _ in EXPORTED]
    measured = run_ranks(2, export_all, EXPORTED, words, str(tmp_path))[0]
    for (name, sharding), expected in zip(EXPORTED, measured, strict=True):
        trial, plain, own = config(*WORDS[name]), script(name), tmp_path / f"{name}_{sharding}"
        split = plain.split("val")
        batch = torch.utils.data.default_collate([split[i] for i in range(min(len(split), trial.data.num_val or 0))])
        assert not list(own.glob(".*")) and not (own / "model.pt").exists()
        assert json.loads((own / "model" / "fsdp_lab.json").read_text())["step"] == 2
        with torch.no_grad():
            loss = plain.loss(read_by_transformers(name, own / "model"), batch).item()
        assert loss == pytest.approx(expected, abs=1e-6), (name, sharding)


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


@pytest.mark.ci
def test_ranks_read_what_transformers_wrote_to_the_bit(tmp_path: Path) -> None:
    """GPT-2 in several files, T5 with its three tied tables, ViT by the names of its publication, and Llama. Llama is
    in bfloat16 there and in float32 here. A step of 1e-300 changes no bit, so trials export what they have read."""
    torch.manual_seed(3)  # not the seed of a trial
    models = {"gpt2": shards_of_gpt2(tmp_path / "gpt2")}
    models |= {name: whole(name, tmp_path / name) for name in ("t5", "vit")}
    models["llama"] = whole("llama", tmp_path / "llama", torch.bfloat16)
    for name in models:
        check(name, tmp_path / name)
    still = ("optimizer=sgd", "optimizer.lr=1e-300", "training.max_steps=1")
    words = [[*from_folder(name, tmp_path / name), *still] for name, _ in READ]
    words.append([*from_folder("llama", tmp_path / "llama"), *still, "precision=bf16_pure"])
    run_ranks(2, export_all, [*READ, PURE], words, str(tmp_path))
    kept = load_file(tmp_path / "llama_root" / "model" / "model.safetensors")
    assert all(torch.equal(values, models["llama"].state_dict()[name]) for name, values in kept.items())
    assert {values.dtype for values in kept.values()} == {torch.bfloat16}
    for name, sharding in READ:
        got = read_by_transformers(name, tmp_path / f"{name}_{sharding}" / "model").state_dict()
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
    save_file({"wte.weight": torch.zeros(1)}, shards / "old.safetensors")
    refused(shards, r"has wte\.weight in .*old\.safetensors.*; remove")
    (shards / "old.safetensors").unlink()
    (shards / "model-00002-of-00006.safetensors").unlink()
    refused(shards, r"missing \(.*h\.0\..*\)\. .* download all parts of the model")
    pickles = tmp_path / "pickles"
    pickles.mkdir()
    (pickles / "config.json").write_text((CONFIGS / "gpt2.json").read_text())
    refused(pickles, r"has no model\.safetensors, nor parts of it")
    torch.save({}, pickles / "pytorch_model.bin")
    refused(pickles, r"Pickles \(\.bin\) are not read.*save_pretrained")
