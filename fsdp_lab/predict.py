"""Load an exported model, score the test split, and draw what it says.

python -m fsdp_lab.predict run=<MLflow run id>
python -m fsdp_lab.predict file=outputs/.../model.pt data.root=<folder that has FashionMNIST/>

Takes also `device=auto|cpu|cuda` (auto: a GPU where PyTorch sees one), `tracking.uri`, `data.download=false` and
`out=<folder for predictions.png>`. Images are looked for in `data.root` (outputs/data), never where the model's file
says.
"""

from __future__ import annotations

import fsdp_lab.installed  # noqa: F401

# isort: split
import dataclasses
import sys
from pathlib import Path

from fsdp_lab.config import ConfigError, UserError, read_words
from fsdp_lab.config.sweep import TrackingConfig
from fsdp_lab.config.workload import DataConfig

KEYS = ("run", "file", "data.root", "data.download", "tracking.uri", "out", "device")
DEVICES = ("auto", "cpu", "cuda")
_PICTURES = 32
_BATCH = 256


def main() -> int:
    try:
        options = read_options(sys.argv[1:])
        file = Path(options["file"]) if "file" in options else fetch(options)
        predict(file, options)
    except UserError as error:
        print(f"fsdp_lab.predict: {error}", file=sys.stderr)
        return 2
    return 0


def read_options(arguments: list[str]) -> dict[str, str]:
    """`key=value` words as a dictionary.

    Raises:
        ConfigError: an unknown key or device, or neither or both of `run` and `file`.
    """
    options = read_words(arguments, KEYS, __doc__ or "")
    if ("run" in options) == ("file" in options):
        raise ConfigError("give one of run=<MLflow run id> and file=<path of a model.pt>.")
    if options.get("device", "auto") not in DEVICES:
        raise ConfigError(f"device={options['device']} is not an option. Choose one of: {', '.join(DEVICES)}.")
    return options


def fetch(options: dict[str, str]) -> Path:
    """The exported model of an MLflow run, copied to where it can be read."""
    from fsdp_lab.tracking import fetch_artifact

    tracking = TrackingConfig(uri=options.get("tracking.uri", TrackingConfig.uri))
    return fetch_artifact(tracking, options["run"], "model/model.pt", out_folder(options))


def out_folder(options: dict[str, str]) -> Path:
    """Where the picture goes: `out`, beside the model's file, or a folder of the run's."""
    if "out" in options:
        return Path(options["out"])
    return Path(options["file"]).parent if "file" in options else Path("outputs/predict", options["run"])


def predict(file: Path, options: dict[str, str]) -> None:
    """Score the test split and write `predictions.png`."""
    import torch
    import torch.nn.functional as F

    from fsdp_lab.training.export import load_exported
    from fsdp_lab.workloads.build import build_source
    from fsdp_lab.workloads.vision.images import ImageDataset, expand_channels

    device = torch.device(device_type(options.get("device", "auto"), torch.cuda.is_available()))
    exported = load_exported(file)
    data = data_of(exported.data, options)
    source = build_source(data, exported.model)
    source.prepare()
    split = source.read()[1].first(data.num_val)
    dataset = ImageDataset(split, exported.model)
    with torch.no_grad():
        batches = [dataset[index] for index in torch.arange(len(split)).split(_BATCH)]
        module = exported.module.to(device)
        logits = torch.cat([module(expand_channels(images.to(device), exported.model)).cpu() for images, _ in batches])
    guesses = logits.argmax(1)
    loss = F.cross_entropy(logits, split.labels).item()
    accuracy = (guesses == split.labels).float().mean().item()
    print(f"{len(split)} test images of {data.name}: accuracy {accuracy:.4f}, loss {loss:.4f}")
    names = source.class_names or tuple(str(i) for i in range(exported.model.num_classes))
    picture = out_folder(options) / "predictions.png"
    draw(split.images[:_PICTURES], guesses[:_PICTURES].tolist(), split.labels[:_PICTURES].tolist(), names, picture)
    print(f"picture: {picture}")


def device_type(wanted: str, cuda: bool) -> str:
    """`cpu` or `cuda`.

    Args:
        cuda: whether PyTorch sees a GPU.

    Raises:
        UserError: a GPU is wanted and there is none.
    """
    if wanted == "cuda" and not cuda:
        raise UserError("device=cuda: PyTorch sees no GPU here; use device=cpu, or device=auto.")
    return "cuda" if cuda and wanted != "cpu" else "cpu"


def data_of(recorded: DataConfig, options: dict[str, str]) -> DataConfig:
    """The data that the model was trained on, from the place that is named now: a folder that the file names may be
    anybody's choice."""
    download = options.get("data.download", str(DataConfig.download)).lower()
    if download not in ("true", "false"):
        raise ConfigError(f"data.download={download} is not a truth value; use true or false.")
    root = options.get("data.root", DataConfig.root)
    return dataclasses.replace(recorded, root=root, download=download == "true")


def draw(images, guesses: list[int], labels: list[int], names: tuple[str, ...], path: Path) -> None:  # type: ignore[no-untyped-def]
    """A sheet of images uint8 (N, C, H, W), each with what the model says; wrong ones in red, with the truth."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(4, 8, figsize=(11, 6.4), constrained_layout=True)
    for axis in axes.flat:
        axis.axis("off")
    for axis, image, guess, label in zip(axes.flat, images, guesses, labels, strict=False):
        shown = image.permute(1, 2, 0)
        axis.imshow(shown.squeeze(-1) if shown.shape[-1] == 1 else shown, cmap="gray")
        right = guess == label
        axis.set_title(
            names[guess] if right else f"{names[guess]}\n(is {names[label]})",
            fontsize=9,
            color="black" if right else "#c0392b",
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
