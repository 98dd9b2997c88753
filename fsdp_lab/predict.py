"""Load an exported model, score the test split, and draw what it says; of task=seq2seq print three summaries.

python -m fsdp_lab.predict run=<MLflow run id>
python -m fsdp_lab.predict file=outputs/.../model.pt data.root=<folder that has FashionMNIST/>
python -m fsdp_lab.predict file=outputs/.../model

Takes also `device=auto|cpu|cuda` (auto: a GPU where PyTorch sees one), `tracking.uri`, `data.download=false`,
`data.tokenizer=<tokenizer.json>` and `out=<folder for predictions.png>`. Images are looked for in `data.root`
(outputs/data), never where the model's file says; no tokenizer is taken from there either.
"""

from __future__ import annotations

import fsdp_lab.installed  # noqa: F401

# isort: split
import dataclasses
import json
import math
import sys
from contextlib import suppress
from pathlib import Path

from fsdp_lab.config import ConfigError, UserError, read_words
from fsdp_lab.config.sweep import TrackingConfig
from fsdp_lab.config.workload import DATA_FILE, DataConfig, DataGroup, UserData

KEYS = ("run", "file", "data.root", "data.download", "data.tokenizer", "tracking.uri", "out", "device")
DEVICES = ("auto", "cpu", "cuda")
_PICTURES = 32
_BATCH = 256
_SUMMARIES = 3


def main() -> int:
    try:
        options = read_options(sys.argv[1:])
        file = Path(options["file"]) if "file" in options else fetch(options)
        summarise(file, options) if file.is_dir() else predict(file, options)
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
        raise ConfigError("give one of run=<MLflow run id> and file=<path of a model.pt, or of the folder model>.")
    if options.get("device", "auto") not in DEVICES:
        raise ConfigError(f"device={options['device']} is not an option. Choose one of: {', '.join(DEVICES)}.")
    return options


def fetch(options: dict[str, str]) -> Path:
    """Return the exported model of an MLflow run, a file or a folder, copied to where it can be read."""
    from fsdp_lab.tracking import TrackingError, fetch_artifact

    tracking = TrackingConfig(uri=options.get("tracking.uri", TrackingConfig.uri))
    try:
        return fetch_artifact(tracking, options["run"], "model/model.pt", out_folder(options))
    except TrackingError as error:
        with suppress(TrackingError):
            fetch_artifact(tracking, options["run"], f"model/{DATA_FILE}", out_folder(options))
            return fetch_artifact(tracking, options["run"], "model", out_folder(options))
        raise error


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


def summarise(folder: Path, options: dict[str, str]) -> None:
    """Print three articles of the validation split, their headlines and what the model writes, then its loss."""
    import torch

    from fsdp_lab.workloads.hf.weights import load_whole
    from fsdp_lab.workloads.seq2seq import summaries

    device = torch.device(device_type(options.get("device", "auto"), torch.cuda.is_available()))
    files = {name: options[key] for name in ("root", "tokenizer") if (key := f"data.{name}") in options}
    data = summaries.read_val(recorded_data(folder), files)
    model = load_whole(folder).to(device)
    for summary in summaries.summarise(model, data, _SUMMARIES):
        print(f"article:  {summary.article}\nheadline: {summary.headline}\nsummary:  {summary.written}\n", flush=True)
    loss = summaries.score(model, data)
    print(f"{len(data)} validation pairs: loss {loss:.4f}, perplexity {math.exp(min(loss, 700.0)):.2f}")


def recorded_data(folder: Path) -> UserData:
    """
    Raises:
        UserError: the folder does not say on what its model was trained.
    """
    try:
        found = DataGroup.of_plain(json.loads((folder / DATA_FILE).read_text())["data"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{folder} has no {DATA_FILE} that can be read, which says on what data its model was trained; give the "
            "folder model that a trial with task=seq2seq exported."
        ) from error
    if not isinstance(found, UserData):
        raise UserError(f"{folder} is of a model of images; load it with AutoModelForImageClassification.")
    return found


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
