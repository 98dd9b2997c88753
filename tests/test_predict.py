"""Where an exported model is scored; what it scores is compared with the trial in tests/sweep/test_outcomes.py."""

from __future__ import annotations

import pytest

from fsdp_lab.commands.predict import data_of, device_type, read_options
from fsdp_lab.config import ConfigError, UserError
from fsdp_lab.config.workload import DataConfig


@pytest.mark.parametrize(
    ("wanted", "cuda", "expected"),
    [
        ("auto", True, "cuda"),
        ("auto", False, "cpu"),
        ("cpu", True, "cpu"),
        ("cpu", False, "cpu"),
        ("cuda", True, "cuda"),
    ],
)
def test_device(wanted: str, cuda: bool, expected: str) -> None:
    assert device_type(wanted, cuda) == expected


def test_a_gpu_that_is_not_there_is_reported() -> None:
    with pytest.raises(UserError, match="device=cuda: PyTorch sees no GPU here; use device=cpu, or device=auto"):
        device_type("cuda", False)


def test_a_device_is_one_of_three(capsys: pytest.CaptureFixture[str]) -> None:
    assert read_options(["file=model.pt", "device=cpu"]) == {"file": "model.pt", "device": "cpu"}
    with pytest.raises(ConfigError, match=r"device=tpu is not an option\. Choose one of: auto, cpu, cuda"):
        read_options(["file=model.pt", "device=tpu"])
    with pytest.raises(SystemExit):
        read_options(["--help"])
    assert "device=auto|cpu|cuda" in capsys.readouterr().out


def test_the_folder_that_a_models_file_names_is_not_used() -> None:
    """The file may be anybody's: images were downloaded to where it said."""
    target = "fsdp_lab.workloads.vision.fashion_mnist.FashionMnist"
    recorded = DataConfig(target, {"root": "/home/somebody/.ssh", "download": False}, num_val=7)
    result = data_of(recorded, {})
    assert (result.name, result.num_val) == ("fashion_mnist", 7)
    assert result.arguments == {"root": "outputs/data", "download": True}
    assert data_of(recorded, {"data.root": "mine", "data.download": "false"}).arguments["root"] == "mine"
