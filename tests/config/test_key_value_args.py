"""Words that stand for a value, and words that the environment adds."""

from __future__ import annotations

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from fsdp_lab.config import ConfigError
from fsdp_lab.config.key_value_args import quoted, store_named, with_environment


@pytest.mark.parametrize(
    "text",
    ["a b", "it's", "back\\slash", "end\\", "x\\'y", "${x}", "a\\${x}", "a\\\\${x}/${y}", "what?", "50%20off",
     "\\\\'${q}'\\", "$x {y}", "${now:%Y}", "outputs/a-b.c", "1e3", "true", "null"],
)  # fmt: skip
def test_hydra_reads_what_was_quoted(text: str):
    value = OverridesParser.create().parse_override(f"key={quoted(text)}").value()
    assert OmegaConf.create({"key": getattr(value, "text", value)}).key == text


def test_mlflows_variables_are_words_unless_others_are_typed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://host:5000")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "")
    assert with_environment(["-m"]) == ["tracking.uri='http://host:5000'", "-m"]
    assert with_environment(["+tracking.uri=sqlite:///a.db"]) == ["+tracking.uri=sqlite:///a.db"]
    assert with_environment(["resume='out'"]) == ["resume='out'"]  # the record has the store
    assert store_named({}) == "http://host:5000" and store_named({"tracking.uri": "sqlite:///a.db"}) == "sqlite:///a.db"
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "what I do")
    assert with_environment(["tracking.uri=x"]) == ["tracking.experiment='what I do'", "tracking.uri=x"]


def test_a_variable_with_a_password_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@host:5000")
    with pytest.raises(ConfigError, match=r"^MLFLOW_TRACKING_URI: its address has a user") as refused:
        with_environment([])
    assert "secret" not in str(refused.value)
