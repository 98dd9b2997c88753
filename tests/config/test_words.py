"""Words of a command line: equal spellings mean the same, what is printed is read again, and variables add words.

What is refused is in tests/messages.txt.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from fsdp_lab.config.overrides import read_overrides
from fsdp_lab.config.words import quoted, store_named, unused_variables, with_environment

SPELLINGS = {
    "sharding=root": [
        "sharding=choice(root)", "sharding='root'", "+sharding=root", "++sharding=root", "sharding@sharding=root",
        "sharding= root", "sharding=glob(roo*)", "sharding=str(root)",
    ],
    "model=lm_tiny,llama3_1b": [
        "model=choice(lm_tiny,llama3_1b)", "model='lm_tiny','llama3_1b'", "model= lm_tiny , llama3_1b",
        "+model=lm_tiny,llama3_1b", "model=choice('lm_tiny',llama3_1b)", "model=tag(x,choice(lm_tiny,llama3_1b))",
        "model=sort(llama3_1b,lm_tiny,reverse=true)",
    ],
    "sharding=per_block,per_layer": ["sharding=glob(per_*)", "sharding=sort(per_layer,per_block)"],
    "training.epochs=3": [
        "training.epochs=choice(3)", "+training.epochs=3", "++training.epochs=3", "training.epochs=range(3,4)",
        "training.epochs= 3", "training.epochs=shuffle(choice(3))",
    ],
    "model.width=8": ["+model.width=8", "++model.width=8", "model.width=choice(8)"],
    "tracking.experiment='1e3'": ["tracking.experiment=1e3", "+tracking.experiment='1e3'"],
    "tracking.experiment=int(5)": ["+tracking.experiment=int(5)"],
    "hydra.sweep.dir='1e3'": ["hydra.sweep.dir=1e3"],
    "tracking.experiment='true'": ["tracking.experiment=true"],
    "optimizer='0.1'": ["optimizer=0.1", "optimizer=choice(0.1)"],
    "experiment=null": ["+experiment=null", "experiment= null"],
}  # fmt: skip


@pytest.mark.parametrize("canonical", SPELLINGS)
def test_equal_spellings_are_read_alike(canonical: str):
    assert [read_overrides([word]) for word in SPELLINGS[canonical]] == [[canonical]] * len(SPELLINGS[canonical])
    assert read_overrides([canonical]) == [canonical], "also when it is read again, by a resume"


def test_what_is_text_already_is_left_as_it_is_typed():
    """So that commands which are printed later read like the one that was typed. Of two values the last counts."""
    words = ["optimizer.beta1=1e-3,1e-2", "training.seed=range(1,4)", "model.table={a:1},{b:2}", "resume=007",
        "objective=[val/loss:min]", "~model.width", "+own_group=a", "model.rate=tag(log,interval(1e-4,1e-2))",
        "cluster.storage_path=null", "forecast.keep=5", "forecast.device=5,6",
        "tracking.experiment=5", "optimizer.lr=1", "optimizer.lr=2"]  # fmt: skip
    assert read_overrides(words) == words


@pytest.mark.parametrize(
    "text",
    ["a b", "it's", "back\\slash", "end\\", "x\\'y", "${x}", "a\\${x}", "a\\\\${x}/${y}", "what?", "50%20off",
     "\\\\'${q}'\\", "$x {y}", "${now:%Y}", "outputs/a-b.c", "1e3", "true", "null"],
)  # fmt: skip
def test_hydra_reads_what_was_quoted(text: str):
    value = OverridesParser.create().parse_override(f"key={quoted(text)}").value()
    assert OmegaConf.create({"key": getattr(value, "text", value)}).key == text


def test_mlflows_variables_are_words_unless_others_are_typed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://host:5000")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "")
    assert with_environment(["-m"]) == ["tracking.uri='http://host:5000'", "-m"]
    assert with_environment(["+tracking.uri=sqlite:///a.db"]) == ["+tracking.uri=sqlite:///a.db"]
    assert with_environment(["resume='out'"]) == ["resume='out'"]  # the record has the store
    assert store_named({}) == "http://host:5000" and store_named({"tracking.uri": "sqlite:///a.db"}) == "sqlite:///a.db"
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "what I do")
    assert with_environment(["tracking.uri=x"]) == ["tracking.experiment='what I do'", "tracking.uri=x"]
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/ours.yaml").write_text("# @package _global_\ntracking:\n  uri: http://ours:5000\n")
    assert with_environment(["experiment=ours"], str(tmp_path)) == [
        "tracking.experiment='what I do'", "experiment=ours"
    ]  # fmt: skip
    assert len(with_environment(["experiment=nightly"], str(tmp_path))) == 3
    monkeypatch.setenv("MLFLOW_RUN_ID", "a1b2")
    monkeypatch.delenv("MLFLOW_EXPERIMENT_ID", raising=False)
    assert unused_variables() == ["MLFLOW_RUN_ID is not used: each trial gets a run of its own"]
