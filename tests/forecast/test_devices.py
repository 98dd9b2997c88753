"""Figures of devices: data sheets, which one a forecast uses, and how finished trials correct them."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from importlib.metadata import version
from itertools import combinations
from pathlib import Path
from unittest import mock

import pytest
import yaml

from benchmarks import first_trial
from fsdp_lab.config import ConfigError
from fsdp_lab.config.machine import RunningCluster
from fsdp_lab.config.options import conf_dir, device_file, known_devices
from fsdp_lab.config.status import TrialStatus
from fsdp_lab.forecast import devices
from fsdp_lab.forecast.capacity import Host
from fsdp_lab.forecast.forecast import forecast
from fsdp_lab.forecast.keep import ratio_group
from fsdp_lab.forecast.observations import observations_file, read_observations, record_observation
from fsdp_lab.forecast.request import Request
from fsdp_lab.forecast.run import forecast_one
from fsdp_lab.forecast.speed.device import Basis, Errors, Factors, KnownError, digest, load_device, on_network
from fsdp_lab.forecast.speed.predict import Parts, predict
from fsdp_lab.forecast.speed.program import Kind, Stream
from fsdp_lab.forecast.speed.refine import Observation, pair_error, refine
from fsdp_lab.record.sweep_json import SweepStart
from fsdp_lab.sweep.forecasts import Forecasts, noise_of, ran_there, reliable_step_s
from fsdp_lab.training.speed import PEAK_FLOPS
from tests.conftest import FakeGpus
from tests.forecast.planted import ROUND, gather, observations, operator, sheet
from tests.ranks import config
from tests.sweep.planted import CPU

SHEETS = sorted((conf_dir() / "device").glob("*.yaml"))


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_every_data_sheet_is_read_and_training_knows_its_peaks():
    """Training measures the MFU that a forecast predicts, without YAML; TF32 has half the rate of 16 bits.

    A V100 has no bfloat16, and neither it nor an MI250 has TF32.
    """
    assert {path.stem for path in SHEETS} == set(known_devices()) >= {"a100_40gb", "a100_80gb", "h100_sxm"}
    for path in SHEETS:
        device = load_device(path)
        errors = [error for error in vars(device.errors).values() if error is not None]
        assert device.source and all(error.median <= error.p90 <= device.errors.other.p90 for error in errors), device
        shares = [*vars(device.reached).values(), *vars(device.efficiency).values()]
        assert all(0 < share <= 1 for share in shares if share is not None), device
        peaks = {dtype: peak for dtype, peak in device.peak_flops.items() if not dtype.startswith("float8")}
        assert PEAK_FLOPS[device.name] == peaks and 0 < peaks["float32"] <= peaks["float16"]
        lacks = {"v100_32gb": {"bfloat16", "tfloat32"}, "mi250": {"tfloat32"}}
        assert {"bfloat16", "float16", "tfloat32", "float32"} - peaks.keys() == lacks.get(path.stem, set())
        assert peaks.get("bfloat16", peaks["float16"]) == peaks["float16"]
        assert peaks.get("tfloat32", peaks["float16"] / 2) == pytest.approx(peaks["float16"] / 2, rel=0.02)


def test_files_and_pages_have_the_figures_that_were_found():
    """`make published` writes them for the files of its devices, with errors of sources that were left out."""
    found = (conf_dir().parent / "experiments/published/results/summary.md").read_text()
    blocks = re.findall(r"^(\w+(?:, \w+)*):\n```yaml\n(.*?)```", found, re.DOTALL | re.MULTILINE)
    for names, block in blocks:
        for name in names.split(", "):
            content = yaml.safe_load((conf_dir() / "device" / f"{name}.yaml").read_text())
            assert {key: content[key] for key in yaml.safe_load(block)} == yaml.safe_load(block), name
    assert len(blocks) == 6
    medians = re.findall(r"^\| speed, (\w+) \| .*? \| median ([\d.]+)%", found, re.MULTILINE)
    eager, compiled, float8 = (dict(medians)[kind] for kind in ("eager", "compiled", "float8"))
    page = (conf_dir().parent / "README.md").read_text()
    assert f"{eager} % eager, {compiled} % compiled and {float8} % in float8" in " ".join(page.split())


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("efficiency", {"matmul": 1.0}, r"efficiency is not a data sheet of a device: missing \['attention', 'float8'"),
        ("node_size", None, r"missing \['node_size'\], unknown \[\]"),
        ("relative", {"median": 0.01, "p90": 1.5}, "relative.p90=1.5 is a share of a step's time"),
        (
            "errors",
            {"other": {"median": 0.1, "p90": 0.2, "sources": 1.5}},
            r"other\.sources=1.5 is a count; use a whole",
        ),
        ("peak_flops", {"bfloat16": "312e12"}, r"peak_flops\.bfloat16=312e12 .*; YAML writes 1\.0e\+12"),
    ],
)
def test_a_wrong_data_sheet_says_what_is_wrong(tmp_path: Path, key: str, value: object, message: str):
    content = {**yaml.safe_load(SHEETS[0].read_text()), key: value}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({k: v for k, v in content.items() if v is not None}))
    with pytest.raises(ConfigError, match=message):
        load_device(tmp_path / "mine.yaml")


def test_an_own_data_sheet_is_used_and_what_it_lacks_is_named(tmp_path: Path):
    text = (device_file("a100_80gb") or Path()).read_text().replace("memory_gib: 79.25", "memory_gib: 1.5")
    (tmp_path / "mine.yaml").write_text(re.sub("peak_flops: .*", "peak_flops: {bfloat16: 312.0e+12}", text))
    settings = config("model=mlp", "precision=fp32", "forecast.device=mine.yaml")
    request = Request.of(settings, 2)
    assert request.cuda and request.capacity_bytes == 1.5 * 2**30
    given = config("forecast.device=mine.yaml", "forecast.capacity_gib=1")
    assert Request.of(given, 2).capacity_bytes == 2**30, "what is typed counts more than the data sheet"
    result = forecast(settings, 2, cuda=True, sheet=request.sheet)
    assert result.no_speed and "has no peak for float32; its data sheet has bfloat16" in result.no_speed
    assert result.speed is None and result.error is None and result.peak_bytes > 0, "the memory is known all the same"
    devices.check_device(settings, 16)
    with pytest.raises(ConfigError, match=r"cluster.num_workers=12 .* nodes have 8 devices.* use a multiple of 8"):
        devices.check_device(settings, 12)
    with pytest.raises(ConfigError, match=r"^sharding.tp=3 .* divide the 8 devices of one; use one of 1, 2, 4, 8"):
        devices.check_device(config("sharding.tp=3", "forecast.device=mine.yaml"), 6)


def test_a_sweep_has_the_memory_and_speed_of_its_own_gpus(fake_gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch):
    """`auto` is for this machine's GPUs, and for CPUs without one; of another device the host is not known."""
    monkeypatch.setattr("fsdp_lab.forecast.devices.host_memory", lambda: 7)
    auto, theirs, ours = (config(*words) for words in ((), ("forecast.device=a100_40gb",), ("forecast.device=h200",)))
    fake_gpus(2, 81920, 40960)  # which are called NVIDIA H200
    for one, known, host in ((theirs, None, Host(None, 8)), (ours, sheet("h200"), Host(7, 2))):
        assert devices.capacity_here(one, cuda=True) == 40960 * 2**20, "the smallest"
        assert (devices.data_sheet_here(one, cuda=True), Request.of(one, 8).host) == (known, host)
    assert devices.capacity_bytes(theirs, cuda=True) == int(39.5 * 2**30), "a forecast is asked about that device"
    asked = Request.of(auto, 8)
    assert (asked.cuda, asked.sheet, asked.host) == (True, sheet("h200"), Host(7, 2))
    monkeypatch.setattr("fsdp_lab.config.machine._asks", [RunningCluster])
    monkeypatch.setattr("fsdp_lab.config.machine._clusters", {"head:6379": RunningCluster(8, False)})
    there = config("forecast.device=auto", "cluster.address=head:6379")
    assert devices.capacity_here(there, cuda=True) is None, "other nodes' GPUs are not this machine's"
    fake_gpus(0)
    assert not Request.of(auto, 8).cuda and Request.of(ours, 8).host == Host(None, 8)


def test_nodes_have_the_gpus_that_the_key_says():
    assert devices.data_sheet(config("forecast.device=h100_sxm")) == sheet("h100_sxm")
    fewer = config("forecast.device=h100_sxm", "cluster.gpus_per_node=4", "sharding.tp=8")
    assert devices.data_sheet(fewer) == replace(sheet("h100_sxm"), node_size=4)
    with pytest.raises(ConfigError, match=r"sharding\.tp=8 .* does not divide the 4 devices of one"):
        devices.check_device(fewer, 8)


def test_many_trials_report_the_factors():
    true = Factors(compute=1.3, communication=0.8, overlap=0.6)
    refined = refine(ROUND, observations(40, true), "one")
    assert refined.basis is Basis.trials and refined.factors.settings == 40
    assert refined.factors.compute == pytest.approx(1.3, rel=0.02)
    assert refined.factors.communication == pytest.approx(0.8, rel=0.02)
    assert refined.factors.overlap == pytest.approx(0.6, abs=0.03)
    # two whose communication took three times as long are within 8 % already
    two = [Observation(f"{s}", Parts(1.0, s, 0.0, 0.0), 1 + 3 * s, "", "", "one", 0.0) for s in (0.5, 0.05)]
    factors = refine(ROUND, two, "one").factors
    assert [one.parts.step_s(factors) for one in two] == pytest.approx([one.measured_s for one in two], rel=0.08)


def test_the_error_is_that_of_settings_factors_have_not_seen():
    known = replace(ROUND, errors=Errors(KnownError(0.1, 0.3)))
    noisy = refine(known, observations(40, Factors(1.2, 1.1), spread=0.3), "one")
    assert 0.15 < noisy.errors.other.p90 <= 0.35
    for relative, least in ((None, 0.15), (KnownError(0.02, 0.06), 0.03)):
        exact = refine(replace(known, relative=relative), observations(40, Factors(1.2, 1.1)), "one")
        assert exact.errors.of(["eager"]).p90 == pytest.approx(least), "at least half of what it was"
        assert exact.relative and exact.relative.p90 == pytest.approx(least)
    assert digest(exact) == digest(known), "trials that it predicts count for the same figures"
    # of 7 ratios 21 pairs: the median is the 11th, nine of ten are up to the 19th; a common factor changes nothing
    ratios = [0.9, 0.95, 1.0, 1.0, 1.05, 1.1, 1.2]
    errors = sorted(max(a, b) / min(a, b) - 1 for a, b in combinations(ratios, 2))
    result = pair_error([[2 * ratio for ratio in ratios]])
    assert result and (result.median, result.p90) == (pytest.approx(errors[10]), pytest.approx(errors[18]))


# 5e11 operations at half of 1e13 a second, and before them half of 8e9 bytes at 1e11
SENT = replace(gather(8e9, 2), stream=Stream.gather, writes=(1,))
PRODUCT = operator(Kind.matmul, flops=5e12, dtype="bfloat16", reads=(1,))


def test_trials_scale_compute_and_communication_apart():
    corrected = replace(ROUND, factors=Factors(compute=2.0, communication=3.0))
    speed = predict([SENT, PRODUCT], corrected)
    assert speed.step_s == pytest.approx(2 * 0.1 + 3 * 0.04)
    assert (speed.shares["compute"], speed.shares["gather"]) == pytest.approx((0.2 / 0.32, 0.12 / 0.32))
    for device in (ROUND, corrected):  # what trials are compared with does not depend on trials
        parts = predict([SENT, PRODUCT], device).parts
        assert parts and (parts.compute, parts.communication) == pytest.approx((0.1, 0.04))


@pytest.mark.parametrize(
    ("trials", "relative", "step_s", "error"),
    [
        ([("one", 1.15)], 0.08, 1.15 * 0.14, 0.08),  # the ratio, and its own error
        ([("one", 0.5)], 0.08, 0.5 * 0.14, 0.2),  # alone, and off by more than 1.5: it does not narrow the range
        ([("one", 3.3), ("one", 3.3)], 0.08, 3.3 * 0.14, 0.08),  # two that agree do
        ([("one", 3.0), ("one", 3.6)], 0.08, (1 / 3 + 1 / 3.6) / (1 / 9 + 1 / 3.6**2) * 0.14, 0.2),  # these differ
        # those of its group count; (1.1 a - 1)^2 + (1.2 a - 1)^2 is least for 1 / a = 1.146
        ([("one", 1 / 1.1), ("one", 1 / 1.2), ("two", 3.0)], 0.08, 2.3 / 2.65 * 0.14, 0.08),
        ([("one", 1.15)], None, 1.15 * 0.14, 0.2),  # its error is not known
        # of another group the range stays, and covers both; one says a third of it, two that agree two thirds
        ([("two", 1.15)], 0.08, 1.15 ** (1 / 3) * 0.14, 0.2),
        ([("two", 1.15), ("two", 1.15)], 0.08, 1.15 ** (2 / 3) * 0.14, 0.2),
        ([("two", 1.15)] * 3, 0.08, 1.15 * 0.14, 0.2),
        ([("two", 3.3)], 0.08, 0.14, 0.2),  # off by more than 1.5: of its own group only, but where three agree
        ([("two", 3.3)] * 2, 0.08, 0.14, 0.2),
        ([("two", 3.3)] * 3, 0.08, 3.3 * 0.14, 0.2),
        ([("network", 3.0), ("host", 3.0)], 0.08, 0.14, 0.2),  # which say nothing of other steps
    ],
)
def test_one_trial_corrects_the_other_forecasts(
    trials: list[tuple[str, float]], relative: float | None, step_s: float, error: float
):
    """Of a step of 0.14 s that is known to 20 %, by trials of other shapes."""
    device = replace(ROUND, relative=relative and KnownError(0.02, relative))
    parts = {"one": Parts(0.9, 0.05, 0.0, 0.4), "two": Parts(0.96, 0.04, 0.0, 0.0)}
    parts |= {"network": Parts(0.9, 0.1, 0.0, 0.0), "host": Parts(0.9, 0.0, 0.1, 0.0)}
    ran = [Observation(f"{n}", parts[g], r * parts[g].step_s(), "", "", g, 0.0) for n, (g, r) in enumerate(trials)]
    speed = predict([SENT, PRODUCT], refine(device, ran, "one"))
    assert speed.step_s == pytest.approx(step_s, rel=1e-4)
    both = [speed.step_s, speed.step_s if trials[0][0] == "one" else 0.14]
    ends = (min(both) / (1 + error), max(both) / (1 - error))
    assert (speed.error, speed.low_s, speed.high_s) == pytest.approx((error, *ends))


def test_a_trial_of_few_uneven_steps_weighs_less():
    """Factors least squares: the sum of (a r - 1)^2 over the square of the noise, for r = 1 and 1 / 2."""
    parts = Parts(0.9, 0.05, 0.0, 0.4)
    even, uneven = (
        Observation(f"{took}", parts, took * parts.step_s(), "", "", "one", 0.0, noise)
        for took, noise in ((1.0, 0.05), (2.0, 0.5))
    )
    by = predict([SENT, PRODUCT], refine(ROUND, [even, uneven], "one")).step_s / 0.14
    assert by == pytest.approx((1 + 0.5 / 100) / (1 + 0.25 / 100), rel=1e-4)
    # 95 % of normal figures are below 1.645 deviations: of 0.1 s here, and a mean of 25 is known to a fifth of it
    steps = {"perf/step_time_p50_s": 1.0, "perf/step_time_p95_s": 1.16449, "perf/timed_steps": 25.0}
    assert noise_of(steps) == pytest.approx(0.02, rel=1e-3) and noise_of({}) == 0


@pytest.mark.parametrize("settings", [1, 8])
@pytest.mark.parametrize("alike", [False, True])
def test_a_corrected_step_over_an_assumed_network(settings: int, alike: bool):
    """A gather of 8e9 bytes among two nodes, beside one product of 0.1 s and before another; a launch takes 1 ms.

    15/16 of the bytes at 4e10 a second, all of the network, are 0.1875 s. The last product ends at 0.2885 s, 99 ms are
    hidden, and a quarter of that is lost: 0.31325 s. Half of the network: 0.50075 s. Of twice the network, 640 Gbit/s,
    a node reaches 0.7838 / 0.8888 as large a share: the gather takes 0.10631 s, 99 ms are hidden, 0.23206 s.
    """
    network = 1 / (0.96 - 0.105 * math.log2(1.6))  # of 320 Gbit/s, with which it reaches all
    efficiency, errors = (
        replace(ROUND.efficiency, overlap=0.75, network=network),
        Errors(KnownError(0.1, 0.3), KnownError(0.05, 0.1)),
    )
    device = replace(
        ROUND, launch_s=1e-3, efficiency=efficiency, errors=replace(errors, several_nodes=KnownError(0.1, 0.15)),
        relative=KnownError(0.02, 0.04), factors=Factors(2.0, 3.0, 0.9, settings, alike, True),
    )  # fmt: skip
    program = [replace(SENT, group=tuple(range(16))), replace(PRODUCT, reads=()), PRODUCT]
    speed = predict(program, device, kinds=["eager", "several_nodes"])
    step_s = 2 * (0.31325 - 0.1875) + 3 * 0.1875 + 0.1 * (0.3875 - 0.31325)
    shares = {name: speed.shares[name] for name in ("gather", "launch")}
    assert speed.step_s == pytest.approx(step_s)
    assert shares == pytest.approx({"gather": 3 * 0.1875 / 0.814, "launch": 2 * 0.00075 / 0.814})
    error, times, own = 0.04 if alike and settings == 1 else 0.15, step_s / 0.31325, alike and settings == 8
    fastest = 0.09375 * (0.96 - 0.105 * math.log2(1.6)) / (0.96 - 0.105 * math.log2(3.2)) + 0.101 + 0.099 / 4
    low, high = (step_s, step_s) if own else (fastest * (times if alike else 1), 0.50075 * times)
    assert (speed.error, speed.low_s, speed.high_s) == pytest.approx((error, low / (1 + error), high / (1 - error)))
    assert speed.network is not None and speed.network.reached == (None if own else 1.0)
    copy = replace(operator(Kind.transfer, num_bytes=2e9), stream=Stream.gather)
    copied = predict([copy, PRODUCT], replace(device, launch_s=0.0))
    assert copied.parts and (copied.parts.host, copied.parts.step_s()) == pytest.approx((0.2, 0.2))


@pytest.mark.documents("python -m benchmarks.first_trial")
def test_a_host_that_is_slower_is_in_range_after_a_trial(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("sys.argv", ["first_trial", "model.num_layers=1", "data.seq_len=1024"])
    assert first_trial.main() == 0
    printed = capsys.readouterr().out
    for _, before, host, after in (line.strip("| ").split(" | ") for line in printed.splitlines()[2:6]):
        assert float(host) == pytest.approx(1.15 * float(before.split()[0]), abs=0.02)
        assert float(after.split()[0]) == pytest.approx(float(host), abs=0.01)
    assert "(ran) |" in printed.splitlines()[2]
    assert "corrected by 1 setting that ran on it, which makes its step 1.15 times as long" in printed
    assert not Path("outputs").exists()


def predicted_for_two_cores(folder: Path, *words: str) -> Request:
    (folder / "cpu.yaml").write_text(CPU)
    settings = config(f"forecast.device={folder}/cpu.yaml", "model=mlp", "precision=fp32", *words)
    return Request(settings, 2, False, None, sheet=devices.data_sheet(settings))


def test_finished_trials_correct_forecasts_of_the_same_figures(tmp_path: Path):
    """Of the same version of PyTorch; of two runs of one trial the last counts."""
    asked = predicted_for_two_cores(tmp_path)
    sheet = asked.sheet
    assert sheet is not None
    for n in range(1, 6):
        parts = Parts(0.1 * n, 0.05 * n, 0.0, 0.0)
        group = ratio_group(asked.config, 2, sheet)
        twice = Observation(str(n), parts, 2 * (0.1 * n + 0.05 * n), version("torch"), digest(sheet), group, 0.0)
        record_observation(sheet.name, f"old {n}", replace(twice, setting=f"old {n}", torch="2.0.0"))
        for one in (replace(twice, measured_s=9.0), twice):
            record_observation(sheet.name, str(n), one)
    file = observations_file(sheet.name)
    rows = json.loads(file.read_text())
    wrong = {"setting": ["1"]}, {"measured_s": 10**400}, {"parts": dict.fromkeys(vars(parts), 0.0)}, {"more": 1}
    file.write_text(json.dumps({**rows, **{f"wrong {n}": {**rows["1"], **one} for n, one in enumerate(wrong)}}))
    assert len(read_observations(sheet.name, version("torch"), digest(sheet))) == 5
    corrected = Request.of(asked.config, 2).sheet
    assert corrected is not None and corrected.basis is Basis.trials
    assert corrected.factors.compute == pytest.approx(2) and corrected.factors.settings == 5
    other = on_network(sheet, 1.0)
    assert devices.refined(other, asked.config, 2) == replace(corrected, network_bandwidth=1e9 / 8, network_known=True)
    parts = Parts(1.0, 0.0, 0.0, 0.0)  # bound by compute, as in any model
    bound = Observation("6", parts, 2.0, version("torch"), digest(sheet), "another group", 0.0)
    record_observation(sheet.name, "6", bound)
    other = replace(sheet, launch_s=1.0)
    assert devices.refined(other, asked.config, 2) == other, "other figures start afresh"


@pytest.mark.parametrize(
    ("words", "others", "kept"),
    [
        ([], 0.05, 1),
        ([], 0.2, 0),  # other work used the cores
        (["cluster.address=10.0.0.1:6379"], 0.05, 0),  # it ran elsewhere
        (["cluster.cpus_per_worker=2"], 0.05, 0),  # and is not predicted as it runs
    ],
)
def test_a_trial_that_ends_is_kept_beside_its_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], others: float, kept: int
):
    """Half of 32 samples at 320 a second was waiting. A hand-made state: Ray's part is in tests/sweep."""
    asked = predicted_for_two_cores(tmp_path, "training.global_batch_size=32", *words)
    forecasts = sweep_of_one(asked, monkeypatch, others)
    for _ in range(2):  # a resume may publish it again
        forecasts.ended(0)
    assert asked.sheet is not None
    kept_now = read_observations(asked.sheet.name, version("torch"), digest(asked.sheet))
    expected = (32 / 320 * 0.5, forecast_one(asked).speed.parts, ratio_group(asked.config, 2, asked.sheet))
    assert [(one.measured_s, one.parts, one.group) for one in kept_now] == [expected] * kept


def sweep_of_one(asked: Request, monkeypatch: pytest.MonkeyPatch, others: float = 0.05) -> Forecasts:
    """A sweep that begins now, with a trial that has finished."""
    monkeypatch.setattr("fsdp_lab.sweep.forecasts.resources.num_gpus", lambda: 0)
    metrics = {"perf/samples_per_s": 320.0, "perf/data_wait_share": 0.5, "perf/others_cpu": others}
    state = mock.Mock(forecast=forecast_one(asked), figures=metrics, status=TrialStatus.finished, device="cpu")
    state.trial.config = asked.config
    sweep = mock.Mock(trials=[state], config=asked.config, folder=Path("sweep"), config_of=lambda number: asked.config)
    sweep.started = SweepStart.of([], False, asked.config)
    return Forecasts(sweep)


def test_a_search_suggests_by_the_trials_before_its_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A file that is damaged costs the correction, and the user is told once."""
    asked = predicted_for_two_cores(tmp_path, "training.global_batch_size=32")

    def suggested(forecasts: Forecasts) -> int:
        with mock.patch.object(forecasts, "_forecaster") as forecaster:
            forecasts.added(0)
        return forecaster.submit.call_args.args[0].sheet.factors.settings

    first = sweep_of_one(asked, monkeypatch)
    first.ended(0)
    second = sweep_of_one(asked, monkeypatch)
    assert (suggested(first), suggested(second)) == (0, 1)
    assert asked.sheet is not None
    observations_file(asked.sheet.name).write_text("{")
    assert suggested(second) == 0
    second._sweep.log_once.assert_called_once()  # type: ignore[attr-defined]
    assert "remove it: the next trial writes a new one" in second._sweep.log_once.call_args.args[0]  # type: ignore[attr-defined]


def test_trials_of_the_predicted_gpu_that_did_not_wait_count():
    """32 samples at 320 a second are 0.1 s; a GPU waits for an unknown part of what its process waits."""
    asked = Request(config(), 2, True, None, sheet=sheet("h200"))
    assert [ran_there(asked, device) for device in ("NVIDIA H200", "NVIDIA A100-SXM4-80GB", "")] == [True, False, False]
    waits = [{"perf/samples_per_s": 320.0, "perf/data_wait_share": share} for share in (0.0, 0.5)]
    assert [reliable_step_s(metrics, 32, cuda=True) for metrics in waits] == [0.1, None]
