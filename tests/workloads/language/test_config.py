"""A language model by one word of the command line: what it implies, and that both ways to read it agree."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from fsdp_lab.config import CombinationError, ConfigError, SweepConfig, UserError, conf_dir, to_dict, with_custom
from fsdp_lab.config.checks import check
from fsdp_lab.config.compose import Trial, register_schema, typed_config
from fsdp_lab.sweep.plan import plan_sweep
from fsdp_lab.training.__main__ import read_config
from fsdp_lab.workloads.build import build_model_spec, build_workload


@pytest.mark.parametrize(
    ("typed", "implied"),
    [
        ("task=language", "model=lm_tiny data=pydoc"),
        ("model=lm_tiny", "task=language data=pydoc"),
        ("data=pydoc", "task=language model=lm_tiny"),
        ("model=llama3_8b", "task=language data=synthetic_tokens"),
        ("-m model=llama3_1b,llama3_8b sharding=root", "task=language data=synthetic_tokens"),
        ("model=llama3_8b data=pydoc task=language", ""),
        ("model._target_=my.Net task=language", "data=pydoc model=custom"),
        ("model=lm_tiny data._target_=my.Corpus", "task=language data=custom"),
        ("model=mine task=language", "data=pydoc"),
        ("experiment=zero2_zero3 task=language", "model=lm_tiny data=pydoc"),
        ("experiment=ray_template task=language", ""),
        ("experiment=mine task=language", ""),
        ("model=vit_tiny", ""),
        ("data=pydoc_summaries model._target_=my.Net", "task=seq2seq model=custom"),
        ("task=classification", ""),
        ("data=synthetic", ""),
        ("", ""),
    ],
)
def test_words_that_one_word_implies(typed: str, implied: str) -> None:
    got = with_custom(typed.split())
    assert sorted(got) == sorted([*typed.split(), *implied.split()])
    assert [word for word in got if word in typed.split()] == typed.split(), "in the order in which they were typed"


def composed(*words: str) -> SweepConfig:
    register_schema()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return typed_config(compose("config", with_custom(words)))


@pytest.mark.parametrize("word", ["task=language", "model=llama3_1b", "data=pydoc"])
def test_torchrun_reads_what_hydra_composes(word: str) -> None:
    ours, hydras = (to_dict(config) for config in (read_config(None, [word]), composed(word)))
    assert [ours[group] for group in ("model", "data", "task")] == [hydras[g] for g in ("model", "data", "task")]


@pytest.mark.parametrize(
    ("option", "num_params"),
    [("llama3_1b", 1_235_814_400), ("llama3_8b", 8_030_261_248), ("llama3_70b", 70_553_706_496)],
)
def test_options_have_the_published_number_of_parameters(option: str, num_params: int) -> None:
    """The checkpoints' own counts: meta-llama/Llama-3.2-1B, Meta-Llama-3-8B and Meta-Llama-3-70B on Hugging Face."""
    config = composed(f"model={option}")
    with torch.device("meta"):
        model = build_model_spec(config.model).build()
    assert sum(p.numel() for p in model.parameters()) == num_params
    assert to_dict(config.data)["vocab_size"] == 128256, "random tokens are those of the model"


def test_a_grid_leaves_out_the_cells_that_mix_them() -> None:
    def trial(words: Sequence[str], number: int) -> Trial:
        return Trial(number, composed("task=language", *words), {}, list(words), Path(), OmegaConf.create())

    plan = plan_sweep([["model=lm_tiny"], ["model=vit_tiny"]], trial)
    assert [planned.overrides for planned in plan.trials] == [["model=lm_tiny"]]
    assert list(plan.left_out.values()) == [["model=vit_tiny"]]


def test_a_vocabulary_that_is_too_small_is_refused(tmp_path: Path) -> None:
    """Before Ray starts, and on a cluster, whose files are not here."""
    words = {f"w{i}": i for i in range(299)} | {"red": 299, "blue": 300, "?": 301}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "t.json"))
    model = "model._target_=tests.workloads.user.odd.Summariser"
    text = ("data=pydoc_summaries", model, f"data.tokenizer={tmp_path}/t.json")
    check(composed(*text, "model.vocab_size=302"))
    config = composed(*text, "model.vocab_size=256")
    message = f"model.vocab_size=256 is less than the 302 tokens of data.tokenizer={tmp_path}/t.json; use model.voc"
    for call in (lambda: check(config), build_workload(config.model, config.data, config.task).data.load):
        with pytest.raises(CombinationError, match=message + ".*, or a tokenizer with at most 256 tokens."):
            call()


def test_a_folder_without_texts_is_one_message(tmp_path: Path) -> None:
    words = ["data=wikihow", f"data.root={tmp_path}", "model._target_=tests.workloads.user.odd.Summariser"]
    config = read_config(None, words)
    with pytest.raises(UserError) as caught:
        build_workload(config.model, config.data, config.task).data.prepare()
    with pytest.raises(UserError) as early:
        check(composed(*words))
    assert str(early.value) == str(caught.value), "what a worker would say is said before Ray starts"
    address = ("cluster.address=127.0.0.1:6379", "cluster.num_workers=2")
    check(composed(*words, *address))  # there the files are looked for on its nodes


def test_a_vocabulary_that_is_not_known_is_asked_for_under_torchrun() -> None:
    with pytest.raises(ConfigError, match=r"\$\{model.vocab_size\} refers to model.vocab_size, which is not set"):
        read_config(None, ["data=synthetic_tokens", "model=custom"])
