"""Numbers and times in sentences, and patterns that stand for the names of modules."""

from __future__ import annotations

from fsdp_lab.config.wording import count, duration, four_digits, significant
from fsdp_lab.training.layout import matches, shortened


def test_numbers_and_times_in_sentences():
    assert [count(number, "trial") for number in (0, 1, 1254)] == ["0 trials", "1 trial", "1,254 trials"]
    times = {0.2: "0 s", 59.6: "1 min 0 s", 125: "2 min 5 s", 3599.7: "1 h 0 min", 11400: "3 h 10 min", -3: "0 s"}
    assert {seconds: duration(seconds) for seconds in times} == times
    three = {8.8: "8.80", 0.012345: "0.0123", 9.996: "10.0", 99.96: "100", 14523.4: "14,523", 0: "0", -2.719: "-2.72"}
    assert {value: significant(value) for value in three} == three
    four = {10070.4: "10,070", 999.96: "1,000", 75.831: "75.83", 103.4: "103.4"}
    assert {value: four_digits(value) for value in four} == four


def test_patterns_match_the_chosen_names_and_no_others() -> None:
    names = ["first", *(f"blocks.{i}.{part}" for i in range(12) for part in ("mlp.0", "mlp.1", "mlp.2")), "ln_1"]
    ends = [name for name in names if name.endswith(("mlp.0", "mlp.2"))]
    expected = {"first ln_1": ["first", "ln_*"], "blocks.3.mlp.0": ["blocks.3.mlp.0"]}
    expected |= {" ".join(ends): ["blocks.*.mlp.0", "blocks.*.mlp.2"]}
    for chosen, patterns in expected.items():
        assert shortened(chosen.split(), names) == patterns
        assert [name for name in names if matches(patterns, name)] == chosen.split()
