"""Nights in storage: what other machines find there, and what a kill at any moment leaves. Objects in memory stand for
the store; a real one, with nights that train, is in tests/cluster/test_nights.py."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from fsdp_lab.config import UserError
from fsdp_lab.config.nightly import NightConfig
from fsdp_lab.config.sweep import TrackingConfig
from fsdp_lab.nightly import __main__ as main_module
from fsdp_lab.nightly import night as night_module
from fsdp_lab.nightly import shared
from fsdp_lab.nightly.gate import Result
from fsdp_lab.nightly.nights import ACCEPTED, FAILED, GOOD, LEFT, REGRESSION, RUNNING, Night, night_id, read_nights
from fsdp_lab.nightly.schedule import Schedule
from fsdp_lab.nightly.study import Study
from fsdp_lab.nightly.verdict import baseline_of
from fsdp_lab.status import TrialStatus
from fsdp_lab.storage import Storage, StorageAway

ON = {"device": "cpu", "workers": 1}
RESULTS = {"a": Result([TrialStatus.finished], {"loss": [1.0]})}


@pytest.fixture
def machine(tmp_path: Path) -> Callable[..., Study]:
    """`machine(name)`: the study on a machine with a folder of its own; all have one storage."""
    address = f"memory://bucket/{uuid.uuid4().hex[:8]}"

    def study(name: str, stored: bool = True, keep: int = 1) -> Study:
        config = NightConfig(keep=keep)
        return Study("s", tmp_path / name, config, TrackingConfig(), [], ON, False, "", address if stored else None)

    return study


def a_night(moment: float, verdict: str = GOOD, **more: object) -> Night:
    return Night(night_id(moment), moment, moment, verdict=verdict, results=RESULTS, **more)  # type: ignore[arg-type]


def test_a_night_that_is_over_is_the_baseline_on_another_machine(machine: Callable[..., Study]):
    one, other = machine("one"), machine("other")
    shared.write(one, a_night(0.0), print)
    shared.write(one, a_night(86400.0, RUNNING), print)
    assert shared.read_all(other) == [a_night(0.0)], "nobody else's: it may run"
    assert [night.verdict for night in shared.read_all(one)] == [GOOD, RUNNING]
    assert baseline_of(other, shared.read_all(other)) == a_night(0.0)


def test_a_kill_before_the_verdict_is_in_storage_leaves_it_interrupted_and_after_it_over(
    machine: Callable[..., Study], monkeypatch: pytest.MonkeyPatch
):
    one = machine("one")
    shared.write(one, a_night(0.0, RUNNING), print)

    def killed(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "write", killed)
        with pytest.raises(KeyboardInterrupt):
            shared.write(one, a_night(0.0), print)
    assert [night.verdict for night in shared.read_all(one)] == [RUNNING]
    with monkeypatch.context() as patch:
        patch.setattr(shared, "write_night", killed)
        with pytest.raises(KeyboardInterrupt):
            shared.write(one, a_night(0.0), print)
    assert read_nights(one.folder)[0].verdict == RUNNING
    assert [night.verdict for night in shared.read_all(one)] == [GOOD], "it is not judged again"


def test_a_verdict_waits_for_a_store_that_is_away_and_the_night_for_the_verdict(
    machine: Callable[..., Study], monkeypatch: pytest.MonkeyPatch
):
    one, logged, tries = machine("one"), list[str](), list[str]()

    def away(self: Storage, name: str, content: bytes) -> None:
        tries.append(name)
        if len(tries) != 2:
            raise StorageAway(f"{self.address}: gone")

    monkeypatch.setattr(Storage, "write", away)
    monkeypatch.setattr(shared, "_PAUSE_S", 0.0)
    shared.write(one, a_night(0.0), logged.append)
    assert len(tries) == 2 and "waiting up to 300 s to store the verdict" in logged[0]
    with pytest.raises(
        UserError, match=r"memory://.*gone; the night ends only when its verdict is stored there: start it again"
    ):
        shared.write(one, a_night(1.0), logged.append, patience_s=-1.0)
    assert [night.begun for night in read_nights(one.folder)] == [0.0]


def test_what_another_machine_accepts_is_accepted_here(machine: Callable[..., Study]):
    one, other = machine("one"), machine("other")
    shared.write(one, a_night(0.0), print)
    shared.write(one, a_night(86400.0, REGRESSION), print)
    night_module.accept(other, "the data grew", print)
    assert read_nights(one.folder)[-1].verdict == REGRESSION, "what its own folder has is older"
    result = shared.read_all(one)[-1]
    assert result.verdict == ACCEPTED and result.accepted is not None and result.accepted["reason"] == "the data grew"
    assert "nights.html" in Storage(str(one.shared)).files()


def test_accepting_a_night_of_other_settings_says_so(machine: Callable[..., Study]):
    one, logged = machine("one"), list[str]()
    before = {**ON, "training.epochs": 3, "data.root": "s3://me:t0psecret@host/old"}
    shared.write(one, a_night(0.0, study=before), print)
    now = replace(one, settings={**before, "training.epochs": 2, "data.root": "s3://me:t0psecret@host/new"})
    night_module.accept(now, "the data grew", logged.append)
    assert "is of another study than this command's: data.root was s3://***@host/old and is s3://***@" in logged[0]
    assert "; training.epochs was 3 and is 2. While it is" in logged[0] and "t0psecret" not in logged[0]
    logged.clear()
    night_module.accept(replace(one, settings=before), "again", logged.append)
    assert not any("another study" in line for line in logged)


def test_the_plan_says_that_the_last_night_was_of_another_study(
    machine: Callable[..., Study], capsys: pytest.CaptureFixture[str]
):
    one, now = machine("one"), datetime(2026, 11, 20, tzinfo=UTC)
    shared.write(one, a_night(0.0, study=ON), print)
    schedule = Schedule("0 2 * * *", "UTC", now)
    main_module.print_plan(one, schedule, now)
    assert "another study" not in capsys.readouterr().out
    shared.write(one, a_night(86400.0, FAILED, study={**ON, "workers": 2}), print)
    main_module.print_plan(one, schedule, now)
    assert "of another study than this one: workers was 2 and is 1" in capsys.readouterr().out


def test_nights_from_before_there_was_storage_are_put_when_the_next_begins(machine: Callable[..., Study]):
    alone, one = machine("one", stored=False), machine("one")
    for moment, verdict in ((0.0, GOOD), (86400.0, RUNNING)):
        shared.write(alone, a_night(moment, verdict), print)
    assert shared.read_all(machine("other")) == []
    begun = night_module._begin(one, shared.read_all(one), 172800.0, lambda: 172800.0, print)
    assert [night.verdict for night in shared.read_all(machine("other"))] == [GOOD, LEFT]
    assert begun.id.startswith(night_id(172800.0) + "-"), "two machines may begin in one second"


def a_sweep(address: str, trial: str, *more: str) -> list[str]:
    """Put the objects of a sweep with a trial; return the names of those that stay."""
    stay = ["sweep.json", "trials.jsonl", "forecast/model.json", f"{trial}/metrics.jsonl", *more]
    gone = [f"{trial}/{name}" for name in ("checkpoints/step_1.json", "checkpoints/step_1.x/a", "model.pt", "model/w")]
    for name in [*stay, *gone]:
        Storage(address).write(name, json.dumps({"overrides": [], "folder": trial}).encode())
    return sorted(stay)


@pytest.mark.parametrize("trial", ["0", "precision=fp32,offload=none/0", "checkpoints/0"])
def test_checkpoints_of_old_nights_go_whoever_ran_them(trial: str, machine: Callable[..., Study]):
    one, other = machine("one"), machine("other")
    sweep, elsewhere = f"{one.storage}/a-sweep-1", f"memory://bucket/{uuid.uuid4().hex}"
    stay = a_sweep(sweep, trial, "of_no_trial/checkpoints/x")
    a_sweep(elsewhere, trial)
    before = Storage(elsewhere).files()
    shared.write(one, a_night(0.0, sweeps=[sweep, elsewhere]), print)
    shared.write(one, a_night(86400.0), print)
    night_module.prune(other, print)
    assert sorted(Storage(sweep).files()) == stay
    assert Storage(elsewhere).files() == before, "not below this study's storage"
    assert [night.pruned for night in shared.read_all(one)] == [True, False]
    assert read_nights(other.folder) == []


def test_a_machine_prunes_its_own_folder_though_another_pruned_the_storage(machine: Callable[..., Study]):
    one, other = machine("one"), machine("other")
    for moment in (0.0, 86400.0):
        shared.write(one, a_night(moment), print)
        trial = one.folder / night_id(moment) / "sweep/0"
        (trial / "checkpoints/step_1").mkdir(parents=True)
        (trial / "model.pt").write_text("")
        (trial.parent / "trials.jsonl").write_text(json.dumps({"overrides": [], "folder": "0"}))
    night_module.prune(other, print)
    assert [night.pruned for night in shared.read_all(one)] == [True, False]
    night_module.prune(one, print)
    left = [len(list((one.folder / night_id(moment) / "sweep/0").iterdir())) for moment in (0.0, 86400.0)]
    assert left == [0, 2]


def test_a_sweep_whose_trials_are_not_known_is_reported_and_not_marked(machine: Callable[..., Study]):
    one, logged = machine("one"), list[str]()
    sweep = f"{one.storage}/a-sweep-1"
    a_sweep(sweep, "0")
    Storage(sweep).delete(["trials.jsonl"])
    shared.write(one, a_night(0.0, sweeps=[sweep]), print)
    shared.write(one, a_night(86400.0), print)
    night_module.prune(one, logged.append)
    assert f"could not be removed: {sweep} has checkpoints, but its trials.jsonl names no trial" in logged[0]
    assert not any(night.pruned for night in shared.read_all(one))


@pytest.fixture
def goes_away(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """`goes_away()`: from then on the store does not answer."""

    def away(self: Storage, *arguments: object) -> None:
        raise StorageAway(f"{self.address}: gone")

    return lambda: [monkeypatch.setattr(Storage, name, away) for name in ("files", "write", "put")] and None


def test_a_store_that_goes_away_after_the_verdict_changes_nothing_of_it(
    machine: Callable[..., Study], goes_away: Callable[[], None], monkeypatch: pytest.MonkeyPatch
):
    one, logged = machine("one"), list[str]()
    monkeypatch.setattr(night_module, "run_sweep", lambda *arguments: 0)
    monkeypatch.setattr(
        night_module, "results_in", lambda folder: (SimpleNamespace(statuses=[TrialStatus.finished]), "")
    )
    monkeypatch.setattr(night_module, "judge", lambda study, night, *more: replace(night, verdict=REGRESSION))
    monkeypatch.setattr(night_module, "publish", lambda *arguments: None)
    put = shared.write

    def written(study: Study, night: Night, log: Callable[[str], None]) -> None:
        put(study, night, log)
        if night.over:
            goes_away()

    monkeypatch.setattr(night_module, "write", written)
    assert night_module.run_night(one, 0.0, logged.append) == night_module.REGRESSED
    assert any(text.startswith("the checkpoints of old nights could not be removed: ") for text in logged)


@pytest.mark.parametrize(
    ("ended_in", "status", "words"), [("a night", 130, "interrupted during a night"), ("a wait", 0, "ended")]
)
def test_ctrl_c_while_the_store_is_away_ends_as_ever(
    ended_in: str, status: int, words: str, machine: Callable[..., Study], goes_away: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
):  # fmt: skip
    one = machine("one")

    def interrupted(*arguments: object) -> None:
        if ended_in == "a night":
            shared.write(one, replace(a_night(time.time(), RUNNING), study=one.settings), print)
        goes_away()
        raise KeyboardInterrupt

    monkeypatch.setattr(main_module, "read_study", lambda words: one)  # no command line takes an address in memory
    monkeypatch.setattr(main_module, "run_night", interrupted)
    monkeypatch.setattr(main_module.signal, "signal", lambda *arguments: None)
    monkeypatch.setattr("sys.argv", ["nightly", "--once"])
    assert main_module.main() == status
    assert f"fsdp_lab.nightly: {words}" in capsys.readouterr().out


def test_another_study_needs_both_places_anew(machine: Callable[..., Study]):
    one, other = machine("one"), machine("other")
    shared.write(one, replace(a_night(0.0), study={**ON, "workers": 2}), print)
    message = r"set cluster\.storage_path=\.\.\. and nightly\.folder=\.\.\. for this one, or move"
    elsewhere = f"memory://bucket/{uuid.uuid4().hex}"
    for study in (replace(one, storage=elsewhere), other):  # one of the two anew
        with pytest.raises(UserError, match=message):
            baseline_of(study, shared.read_all(study))
    assert baseline_of(replace(other, storage=elsewhere), shared.read_all(replace(other, storage=elsewhere))) is None
    alone = replace(one, storage=None)
    with pytest.raises(UserError, match=r"set nightly\.folder=\.\.\. for this one, or move"):
        baseline_of(alone, shared.read_all(alone))


def test_an_object_that_is_no_night_is_refused_by_its_address(machine: Callable[..., Study]):
    one = machine("one")
    shared.write(one, a_night(0.0), print)
    storage = Storage(str(one.shared))
    storage.write("2026.json", b'{"id": "../../x", "due": 0, "begun": 0, "results": {}}')
    with pytest.raises(UserError, match=r"2026\.json holds the record of night '../../x'; remove that object"):
        shared.read_all(one)
    storage.write("2026.json", b"{")
    with pytest.raises(UserError, match=rf"{one.shared}/2026\.json cannot be read"):
        shared.read_all(one)


def test_a_study_without_storage_stays_in_its_folder(machine: Callable[..., Study]):
    alone = machine("one", stored=False)
    shared.write(alone, a_night(0.0), print)
    shared.write(alone, a_night(86400.0), print)
    night_module.prune(alone, print)
    assert [night.pruned for night in read_nights(alone.folder)] == [True, False]
    assert alone.where == str(alone.folder) and replace(alone, storage="s3://b").where.endswith(" and s3://b/nights/s")
