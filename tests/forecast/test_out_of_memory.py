"""A GPU's memory that ran out: what PyTorch prints in each version, its snapshots, and what the forecast knows."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdp_lab.commands import explain
from fsdp_lab.config import UserError
from fsdp_lab.forecast.allocator import CachingAllocator, segment_bytes
from fsdp_lab.forecast.forecast import forecast_profile
from fsdp_lab.forecast.out_of_memory import Printed, Shortage, read_message, read_snapshot, smaller_settings, who_asked
from fsdp_lab.memory.profile import Profile
from tests.conftest import ROOT
from tests.ranks import config

# What PyTorch prints: 0.4 to 1.3, 1.4 to 2.0, and since 2.1, with and without what it says of the process.
CACHED = "Tried to allocate {} (GPU 0; {} total capacity; {} already allocated; {} free; {} cached)"
RESERVED = (
    "Tried to allocate {} (GPU 0; {} total capacity; {} already allocated; {} free; {} reserved in total by PyTorch)"
)
SINCE = (
    "Tried to allocate {0}. GPU 3 has a total {5} of {1} of which {3} is free. {6}Of the allocated memory {2} is "
    "allocated by PyTorch, {7}and {4} is reserved by PyTorch but unallocated. If reserved but unallocated memory"
)
OURS, POOLS = (
    "Including non-PyTorch memory, this process has {} memory in use. ",
    "with 2.14 GiB allocated in private pools, ",
)
# Of public reports: asked, capacity, allocated, free, cached or reserved; the last three figures of the form.
REPORTS = {
    "StructureFlow 35": (CACHED, "8.13 GiB", "10.76 GiB", "643.57 MiB", "8.20 GiB", "32.43 MiB"),
    "pytorch-gpu-benchmark 1": (CACHED, "32.00 MiB", "7.79 GiB", "6.64 GiB", "21.00 MiB", "150.86 MiB"),
    "pytorch 16417": (CACHED, "12.50 MiB", "10.92 GiB", "8.57 MiB", "9.28 GiB", "4.68 MiB"),
    "DNN_NeuroSim 28": (CACHED, "1.12 MiB", "22.37 GiB", "15.87 GiB", "3.56 MiB", "787.74 MiB"),
    "GenerativeGraph 5": (CACHED, "1024.00 KiB", "11.17 GiB", "10.90 GiB", "576.00 KiB", "30.96 MiB"),
    "awesome-semantic-segmentation 188": (CACHED, "74.00 MiB", "1.96 GiB", "1.46 GiB", "71.50 MiB", "38.53 MiB"),
    "pytorch 59778": (RESERVED, "2.26 GiB", "6.00 GiB", "781.59 MiB", "3.03 GiB", "1.24 GiB"),
    "unilm 137": (RESERVED, "128.00 MiB", "11.17 GiB", "10.85 GiB", "24.81 MiB", "10.86 GiB"),
    "MADDoG 11": (RESERVED, "2.87 GiB", "14.76 GiB", "8.77 GiB", "19.75 MiB", "13.71 GiB"),
    "mmsegmentation 944": (RESERVED, "1006.00 MiB", "10.91 GiB", "9.18 GiB", "569.81 MiB", "9.49 GiB"),
    "pytorch 35901": (RESERVED, "10.84 GiB", "23.65 GiB", "1.06 GiB", "10.26 GiB", "12.53 GiB"),
    "easydiffusion 104": (RESERVED, "64.00 MiB", "4.00 GiB", "3.35 GiB", "0 bytes", "3.41 GiB"),
    "OOTDiffusion 235": (RESERVED, "30.00 GiB", "79.25 GiB", "27.98 GiB", "24.10 GiB", "31.90 GiB"),
    "MGFN 35": (SINCE, "1.70 GiB", "6.00 GiB", "2.93 GiB", "0 bytes", "2.30 GiB", "capacty", "", ""),
    "MyGirlGPT 11": (SINCE, "32.00 MiB", "4.00 GiB", "2.58 GiB", "41.56 MiB", "1.90 MiB", "capacty",
                     OURS.format("3.44 GiB"), ""),
    "OOTDiffusion 167": (SINCE, "2.00 GiB", "4.00 GiB", "0 bytes", "2.80 GiB", "0 bytes", "capacty", "", ""),
    "torchtune 2071": (SINCE, "1.96 GiB", "23.43 GiB", "22.41 GiB", "210.06 MiB", "206.09 MiB", "capacity",
                       OURS.format("0 bytes"), ""),
    "trl 3436": (SINCE, "388.00 MiB", "9.68 GiB", "6.61 GiB", "95.75 MiB", "2.57 GiB", "capacity",
                 OURS.format("9.54 GiB"), ""),
    "CoSeR 10": (SINCE, "80.00 GiB", "39.50 GiB", "12.87 GiB", "25.24 GiB", "912.01 MiB", "capacity",
                 OURS.format("14.25 GiB"), ""),
    "Vad-R1 11": (SINCE, "14.06 GiB", "79.25 GiB", "56.70 GiB", "6.96 GiB", "14.15 GiB", "capacity",
                  OURS.format("72.28 GiB"), ""),
    "minerva-benchmarks 42": (SINCE, "1.96 GiB", "63.29 GiB", "22.97 GiB", "1.82 GiB", "37.00 GiB", "capacity",
                              OURS.format("61.46 GiB"), POOLS),
}  # fmt: skip


def in_bytes(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"bytes": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}[unit]


@pytest.mark.parametrize("report", REPORTS)
def test_public_messages_are_read(report: str):
    form, *values = REPORTS[report]
    text = f"loss 3\n[rank3]: RuntimeError: CUDA out of memory. {form.format(*values)} try setting\n1.00 GiB free;"
    asked, capacity, allocated, free, held = map(in_bytes, values[:5])
    shortage = read_message(text)
    assert shortage is not None and shortage.asked.num_bytes == asked
    assert (shortage.capacity, shortage.allocated, shortage.free) == (capacity, allocated, free)
    assert shortage.cached == pytest.approx(held - allocated if form is RESERVED else held)
    assert shortage.pages_would_do == (free + shortage.cached >= asked)


def test_a_log_without_such_a_message_has_none_and_the_last_of_several_counts():
    assert read_message("RuntimeError: NCCL error: out of memory") is None
    texts = [form.format(*values) for form, *values in (REPORTS["trl 3436"], REPORTS["Vad-R1 11"])]
    shortage = read_message("".join(f"CUDA out of memory. {text}\n" for text in texts))
    assert shortage is not None and shortage.asked.num_bytes == 14.06 * 2**30
    assert (
        read_message(f"CUDA out of memory. {texts[1]}\nout of memory. Tried to allocate more than 1EB memory.")
        == shortage
    )


def test_what_follows_a_message_is_no_part_of_it():
    shortage = read_message(
        f"CUDA out of memory. Tried to allocate 2.00 GiB.\n{'.' * 500}12.00 GiB free; 1.00 GiB cached)"
    )
    assert shortage is not None and shortage.free is shortage.cached is None


FAILED = {"action": "oom", "size": 1024, "device_free": 0}


class Hostile:
    def __reduce__(self) -> Any:
        return os.mkdir, ("hostile",)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (pickle.dumps({"segments": [], "device_traces": [Hostile()]}), r"names posix\.mkdir"),
        (pickle.dumps({"segments": [], "device_traces": []})[:-4], "no snapshot"),
        (b"hello", "no snapshot"),
        (pickle.dumps([1, 2]), "no snapshot"),
        (pickle.dumps({"segments": [], "device_traces": [[{"action": "alloc"}]]}), "no allocation that failed"),
        (pickle.dumps({"segments": [], "device_traces": [[{"action": "oom"}]]}), "no snapshot"),
        (pickle.dumps({"segments": [{"device": 0}], "device_traces": [[FAILED]]}), "no snapshot"),
        (pickle.dumps({"segments": [], "device_traces": [[FAILED | {"size": -1}]]}), "a size is negative"),
        (pickle.dumps({"segments": [], "device_traces": [[FAILED | {"size": float("nan")}]]}), "no snapshot"),
    ],
)
def test_a_hostile_or_damaged_snapshot_is_refused(
    content: bytes, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "memory_snapshot.pickle"
    file.write_bytes(content)
    with pytest.raises(UserError, match=said):
        read_snapshot(file)
    assert [*tmp_path.iterdir()] == [file], "nothing ran"


LM = ("model=lm_tiny", "task=language", "data=synthetic_tokens", "data.seq_len=256", "data.vocab_size=4096",
      "precision=bf16_mixed")  # fmt: skip


def culprit_of(profile: Profile) -> int:
    """Return the place of the largest allocation of the step."""
    return max(range(profile.begun, len(profile.events)), key=lambda place: profile.events[place].num_bytes)


def test_a_snapshot_of_a_simulated_allocator_is_explained_to_the_byte(tmp_path: Path):
    """The allocator replays the step up to a planted allocation, which the device then refuses."""
    profile = forecast_profile(config(*LM, "sharding=per_block"), 4, cuda=True)
    place = culprit_of(profile)
    allocator, alive = CachingAllocator(), dict[int, int]()
    for event in profile.events[:place]:
        if event.place == "device" and event.num_bytes != alive.get(event.storage, 0):
            if alive.pop(event.storage, 0):
                allocator.free(event.storage)
            if event.num_bytes:
                alive[event.storage] = event.num_bytes
                allocator.allocate(event.storage, event.num_bytes)
    culprit = profile.events[place]
    blocks = [{"state": "active_allocated", "size": -(-n // 512) * 512, "requested_size": n} for n in alive.values()]
    segment = {"device": 0, "total_size": allocator.reserved, "allocated_size": allocator.active, "blocks": blocks}
    failed = {"action": "oom", "size": -(-culprit.num_bytes // 512) * 512, "device_free": 1000, "stream": 0}
    file = tmp_path / "memory_snapshot.pickle"
    file.write_bytes(pickle.dumps({"segments": [segment], "device_traces": [[{"action": "alloc", "size": 1}, failed]]}))

    shortage = read_snapshot(file)
    asking = who_asked(profile, shortage)
    assert asking is not None and asking.event == culprit
    assert sum(asking.held.values()) == sum(alive.values()) + culprit.num_bytes
    assert shortage.cached == allocator.reserved - allocator.active
    assert shortage.largest[0] == max(alive.values())


def test_states_that_the_first_step_of_an_optimizer_allocates_are_known():
    """A state of the embedding has 2,098,176 bytes in float32, which no other tensor of the step has."""
    profile = forecast_profile(config(*LM, "sharding=root", "model.vocab_size=8196"), 1, cuda=True)
    asked = Printed(8196 * 64 * 4, 0.0)
    asking = who_asked(profile, Shortage(asked, allocated=sum(profile.peaks["device"].values()), is_segment=False))
    assert asking is not None and asking.event.category == "optimizer"
    assert asking.event.phase == "first step of the optimizer"


def printed(num_bytes: float) -> str:
    """Return a size as PyTorch prints it."""
    if num_bytes <= 1024:
        return f"{num_bytes} bytes"
    unit, size = next((u, s) for u, s in (("KiB", 2**10), ("MiB", 2**20), ("GiB", 2**30)) if num_bytes <= 1024 * s)
    return f"{num_bytes / size:.2f} {unit}"


def test_the_command_names_the_tensor_and_settings_that_fit(tmp_path: Path):
    """Of a log, by a segment's size; each setting that fits is one that a forecast of its own says fits."""
    words = [*LM, "sharding=root", "training.global_batch_size=8192", "cluster.num_workers=4"]
    profile = forecast_profile(config(*words), 4, cuda=True)
    place = culprit_of(profile)
    culprit = profile.events[place]
    held = next(sum(sums.values()) for at, (sums, _) in enumerate(profile.states()) if at == place - 1)
    asked = printed(segment_bytes(culprit.num_bytes))
    values = (asked, "3.00 GiB", printed(held), "1.00 MiB", "3.00 MiB", "capacity", "", "")
    log = tmp_path / "train.log"
    log.write_text(f"CUDA out of memory. {SINCE.format(*values)}")

    def output(module: str, *typed: str) -> str:
        command, environment = [sys.executable, "-m", module, *typed], {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=True)
        return done.stdout

    said = output("fsdp_lab.explain", str(log), *words)
    assert f"{culprit.category} of {culprit.num_bytes:,} bytes" in said
    assert "does not suffice" in said
    needs = re.search(r"the setting needs ([\d.]+) GiB of 3.000 GiB: 4 workers with 2048 samples each", said)
    assert needs is not None and float(needs[1]) > 3
    fits = re.findall(r"^fits with (.+): needs", said, re.MULTILINE)
    assert 1 <= len(fits) <= 3 and len(set(fits)) == len(fits), said
    for typed in fits:
        of = [*words, *typed.split(), "forecast.device=cuda", "forecast.capacity_gib=3"]
        assert "every setting fits" in output("fsdp_lab.forecast", *of)


def test_what_blocks_save_may_go_to_the_host():
    kept, moved = (list(smaller_settings(config(f"activation_offload={where}"), 2)) for where in ("none", "cpu"))
    assert ["activation_offload=cpu"] in kept and ["activation_checkpointing=full", "activation_offload=cpu"] in kept
    assert not any("activation_offload=cpu" in typed for typed in moved)


def test_a_trials_folder_brings_its_overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    form, *values = REPORTS["trl 3436"]
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text("- model=mlp\n- sharding=root\n")
    (tmp_path / "error.txt").write_text("Traceback\n  nothing of memory")
    monkeypatch.setattr(sys, "argv", ["explain", str(tmp_path)])
    assert explain.main() == 2
    assert "no message of a GPU whose memory ran out" in capsys.readouterr().err
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank1.log").write_text(f"CUDA out of memory. {form.format(*values)}")
    shortage, overrides = explain._read(tmp_path)
    assert overrides == ["model=mlp", "sharding=root"] and shortage.asked.num_bytes == 388 * 2**20
    for typed, said in (
        ([str(tmp_path / "logs" / "rank1.log")], "type the overrides of its setting"),
        (["model=mlp"], "first comes a log"),
    ):
        monkeypatch.setattr(sys, "argv", ["explain", *typed])
        assert explain.main() == 2
        assert said in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["explain", str(tmp_path / "logs")])
    assert explain.main() == 2
    assert "is no trial's folder" in capsys.readouterr().err
