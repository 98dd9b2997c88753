"""What a calibration has measured, priced by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from fsdp_lab.calibrate.__main__ import write_device
from fsdp_lab.config import ConfigError
from fsdp_lab.speed.costs import host_seconds, seconds
from fsdp_lab.speed.device import Basis, DeviceKind, Factors, load_device
from fsdp_lab.speed.measured import HostCosts, Line, Measured, amounts
from fsdp_lab.speed.predict import predict, step_seconds
from fsdp_lab.speed.program import Kind, Operator, Stream
from tests.speed.test_costs import ROUND, gather, operator

LINES = {
    "matmul": {"float32": Line(1e-5, 1e-11, 0.0)},
    "attention": {"float32": Line(0.0, 0.0, 0.0, 1e-4)},
    "memory": {"any": Line(2e-5, 0.0, 1e-10)},
    "aten.gelu": {"float32": Line(0.0, 0.0, 3e-10)},
    "gather": {"float32": Line(1e-3, 0.0, 1e-9), "any": Line(2e-3, 0.0, 1e-9)},
    "scatter": {"any": Line(1e-3, 0.0, 1e-9)},
    "reduce": {"any": Line(1e-3, 0.0, 1e-9)},
}
HOST = HostCosts(operator_s=1e-6, collective_s=1e-3, microbatch_s=1e-4, step_s=1e-2)
MEASURED = Measured("here", "2.15.0", 2, 2, 0.0, LINES, HOST)
HERE = replace(
    ROUND, kind=DeviceKind.cpu, basis=Basis.calibration, measured=MEASURED, launch_s=1e-6, latency_s=1e-6,
    link_latency_s=1e-6, network_latency_s=1e-6,
)  # fmt: skip


def test_an_operator_costs_what_its_line_says():
    product = operator(Kind.matmul, flops=1e9, num_bytes=1e6, dtype="float32")
    assert seconds(product, HERE) == pytest.approx(1e-5 + 1e-2)
    heads = operator(Kind.attention, flops=1e9, dtype="float32", shape=(32, 17, 17, 64))
    assert seconds(heads, HERE) == pytest.approx(32 * 1e-4)
    assert seconds(replace(product, kind=Kind.memory), HERE) == pytest.approx(2e-5 + 1e-4)


@pytest.mark.parametrize(
    ("queries", "keys", "tiles"), [(17, 17, 1), (32, 32, 1), (33, 33, 2), (197, 197, 4), (197, 600, 8), (1024, 1024, 8)]
)
def test_attention_on_a_cpu_is_of_tiles_as_pytorch_makes_them(queries: int, keys: int, tiles: int):
    """Of 32, 64 or 256 queries, from 192 and 768 on, and 512 keys: `FlashAttentionKernel.cpp`."""
    name = "aten._scaled_dot_product_flash_attention_for_cpu"
    some = replace(operator(Kind.attention, shape=(10, queries, keys, 64)), name=name)
    assert amounts(some)[2] == 10 * tiles


def test_a_causal_mask_spares_a_cpu_no_part_of_a_tile():
    shape = (16, 64, 64, 32)
    forward, backward = 4 * 16 * 64 * 64 * 32, 10 * 16 * 64 * 64 * 32
    name = "aten._scaled_dot_product_flash_attention_for_cpu"
    masked = replace(operator(Kind.attention, flops=forward / 2, shape=shape), name=name)
    assert amounts(masked)[0] == forward
    assert amounts(replace(masked, flops=backward / 2, name=f"{name}_backward"))[0] == backward
    assert amounts(replace(masked, name="aten._scaled_dot_product_flash_attention"))[0] == forward / 2
    long = replace(masked, flops=1.0, shape=(16, 1024, 1024, 32))
    assert amounts(long)[0] == 1.0, "whole tiles are left out"


def test_an_operator_without_a_line_of_its_own_has_that_of_its_kind():
    gelu = Operator("aten.gelu", Kind.memory, Stream.compute, "forward", "", num_bytes=1e6, dtype="float32")
    assert seconds(gelu, HERE) == pytest.approx(3e-4)
    assert seconds(replace(gelu, dtype="bfloat16"), HERE) == pytest.approx(2e-5 + 1e-4)
    assert seconds(replace(gelu, name="aten.silu"), HERE) == pytest.approx(2e-5 + 1e-4)


def test_a_product_in_a_dtype_that_was_not_measured_has_no_speed():
    with pytest.raises(ConfigError, match="no matmul in bfloat16 was measured on here, only in float32"):
        seconds(operator(Kind.matmul, flops=1.0, dtype="bfloat16"), HERE)


def test_one_worker_alone_has_measured_no_collective():
    alone = replace(HERE, measured=replace(MEASURED, workers=1, operators={"memory": LINES["memory"]}))
    with pytest.raises(ConfigError, match=r"calibrated with one worker, which sends nothing; run .* with workers=2"):
        seconds(gather(1.0, 2), alone)


def test_a_collective_costs_what_a_rank_sends():
    """Of 8 MB two ranks send one half each, four ranks three quarters in three steps; an all-reduce sends twice."""
    one = replace(gather(8e6, 2), dtype="float32")
    assert seconds(one, HERE) == pytest.approx(1e-3 + 4e-3)
    assert seconds(replace(gather(8e6, 4), dtype="float32"), HERE) == pytest.approx(3e-3 + 6e-3)
    assert seconds(gather(8e6, 2), HERE) == pytest.approx(2e-3 + 4e-3)
    assert seconds(gather(8e6, 2, Kind.reduce), HERE) == pytest.approx(1e-3 + 8e-3)
    assert seconds(gather(8e6, 1), HERE) == 0.0


def test_python_takes_time_before_each_operator():
    forward, backward = operator(Kind.memory), replace(operator(Kind.memory), phase="backward")
    program = [forward, gather(1.0, 2), backward, forward, replace(backward, phase="optimizer")]
    assert host_seconds(program, HERE) == pytest.approx([1e-2 + 1e-4 + 1e-6, 1e-3 + 1e-6, 1e-6, 1e-4 + 1e-6, 1e-6])
    assert host_seconds(program, replace(ROUND, launch_s=5e-6)) == [5e-6] * 5


def test_a_cpu_does_one_thing_after_the_other_but_for_ddps_reductions():
    memory = operator(Kind.memory, num_bytes=1e8)  # 10 ms and 20 us
    host = replace(HERE, measured=replace(MEASURED, host=HostCosts(0.0, 0.0, 0.0, 0.0)))
    sent = replace(gather(8e6, 2), stream=Stream.gather)
    assert step_seconds([sent, memory], host) == pytest.approx(2e-3 + 4e-3 + 1e-2 + 2e-5)
    reduced = replace(gather(8e6, 2, Kind.reduce), stream=Stream.scatter, phase="backward")
    hidden = step_seconds([reduced, memory], host)
    assert hidden == pytest.approx(1e-2 + 2e-5)
    shown = replace(host, factors=Factors(overlap=0.5))
    assert step_seconds([reduced, memory], shown) == pytest.approx(hidden + (1e-3 + 8e-3) / 2)


def test_trials_scale_compute_and_communication_apart():
    product, sent = operator(Kind.matmul, flops=1e9, dtype="float32"), replace(gather(8e6, 2), stream=Stream.gather)
    before = predict([product, sent], HERE)[0].parts
    corrected = replace(HERE, factors=Factors(compute=2.0, communication=3.0))
    assert seconds(product, corrected) == pytest.approx(2 * seconds(product, HERE))
    assert seconds(sent, corrected) == pytest.approx(3 * seconds(sent, HERE))
    after = predict([product, sent], corrected)[0].parts
    assert before is not None and after is not None
    assert vars(after) == pytest.approx(vars(before)), "what trials are compared with does not depend on trials"
    assert before.compute == pytest.approx(1e-2 + 1e-5) and before.communication == pytest.approx(6e-3)
    assert before.launch == pytest.approx(1e-2 + 1e-4 + 2e-6 + 1e-3)


def test_a_calibration_is_read_as_it_was_written(tmp_path: Path):
    write_device(tmp_path / "here.yaml", HERE)
    assert load_device(tmp_path / "here.yaml") == HERE


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("operators", {"aten.mm": {"float32": [1.0, -2.0, 0.0]}}, "negative or not a number"),
        ("operators", {"aten.mm": {"float32": ["fast"]}}, "cannot be read"),
        ("host", {"operator_s": 1.0}, "cannot be read"),
        ("other", 1, "unknown"),
        ("workers", None, "cannot be read"),
        ("version", 1, "version is not"),
        ("host", {"operator_s": float("nan"), "collective_s": 0, "microbatch_s": 0, "step_s": 0}, "not a number"),
    ],
)
def test_a_damaged_calibration_names_its_file_and_the_remedy(tmp_path: Path, key: str, value: object, message: str):
    file = tmp_path / "here.yaml"
    write_device(file, HERE)
    content = yaml.safe_load(file.read_text())
    content["measured"][key] = value
    file.write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError, match=f"here.yaml: .*{message}.*fsdp_lab.calibrate again"):
        load_device(file)
