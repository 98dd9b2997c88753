"""What of a store's objects becomes a file here."""

from __future__ import annotations

from fsdp_lab.sweep.store.fetch import wanted


def test_all_but_checkpoints_is_copied_and_the_record_last():
    names = ["sweep.json", "trials.jsonl", "0/.hydra/config.yaml", "0/metrics.jsonl", "0/checkpoints/step_4.json", "z"]
    assert wanted(names) == ["0/.hydra/config.yaml", "0/metrics.jsonl", "trials.jsonl", "z", "sweep.json"]


def test_names_that_lead_elsewhere_are_left_out():
    assert wanted(["../x", "0/../../x", "/etc/x", ".lock", "0/.alive", ".copy_of", ".hydra/../../x", "a/./b"]) == [
        "a/./b"
    ]
