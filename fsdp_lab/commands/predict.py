"""Load an exported model, score the test split, and draw its predictions; for task=seq2seq print three summaries.

python -m fsdp_lab.predict run=<MLflow run id>
python -m fsdp_lab.predict file=outputs/.../model.pt data.root=<folder that has FashionMNIST/>
python -m fsdp_lab.predict file=outputs/.../model

Other options: `device=auto|cpu|cuda` (auto: a GPU if PyTorch sees one), `tracking.uri`, `data.download=false`,
`data.tokenizer=<tokenizer.json>` and `out=<folder for predictions.png>`. Images are read from `data.root` (default:
outputs/data). Paths of images and tokenizers in the model's file are not used.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from fsdp_lab.config import ConfigError, UserError, read_words
from fsdp_lab.config.describe import docstring
from fsdp_lab.config.key_value_args import store_named
from fsdp_lab.config.sweep import TrackingConfig
from fsdp_lab.config.workload import DATA_FILE, DataConfig
from fsdp_lab.machine.output import outlast_reader

KEYS = ("run", "file", "data.root", "data.download", "data.tokenizer", "tracking.uri", "out", "device")
DEVICES = ("auto", "cpu", "cuda")
_PICTURES = 32
_BATCH = 256
_SUMMARIES = 3


def main() -> int:
    outlast_reader()
    try:
        options = read_options(sys.argv[1:])
        file = Path(options["file"]) if "file" in options else fetch(options)
        summarise(file, options) if file.is_dir() else predict(file, options)
    except UserError as error:
        print(f"fsdp_lab.predict: {error}", file=sys.stderr)
        return 2
    return 0


def read_options(arguments: list[str]) -> dict[str, str]:
    """Return the `key=value` arguments as a dictionary.

    Raises:
        ConfigError: an unknown key or device, or neither or both of `run` and `file`.
    """
    options = read_words(arguments, KEYS, docstring(sys.modules[__name__]))
    if ("run" in options) == ("file" in options):
        raise ConfigError("give either run=<MLflow run id> or file=<path of a model.pt, or of the folder model>.")
    if options.get("device", "auto") not in DEVICES:
        raise ConfigError(f"device={options['device']} is not an option. Choose one of: {', '.join(DEVICES)}.")
    return options


def fetch(options: dict[str, str]) -> Path:
    """Return the exported model of an MLflow run, a file or a folder, copied to a readable place."""
    from fsdp_lab.tracking import TrackingError, fetch_artifact

    tracking = TrackingConfig(uri=store_named(options))
    try:
        return fetch_artifact(tracking, options["run"], "model/model.pt", out_folder(options))
    except TrackingError as error:
        with suppress(TrackingError):
            fetch_artifact(tracking, options["run"], f"model/{DATA_FILE}", out_folder(options))
            return fetch_artifact(tracking, options["run"], "model", out_folder(options))
        raise error


def out_folder(options: dict[str, str]) -> Path:
    """Return the folder for the picture: `out`, beside the model's file, or a folder for the run."""
    if "out" in options:
        return Path(options["out"])
    return Path(options["file"]).parent if "file" in options else Path("outputs/predict", options["run"])


def predict(file: Path, options: dict[str, str]) -> None:
    """Score the test split and write `predictions.png`."""
    import torch
    import torch.nn.functional as F

    from fsdp_lab.training.export import load_exported
    from fsdp_lab.workloads.user.data import make_split
    from fsdp_lab.workloads.vision.images import expand_channels

    device = torch.device(device_type(options.get("device", "auto"), torch.cuda.is_available()))
    exported = load_exported(file)
    data = data_of(exported.data, options)
    split: Any = make_split(data.function(), str(data.target), "val", data.arguments_for(exported.model))
    count, channels = min(len(split), data.num_val or len(split)), exported.model.sizes()["num_channels"]
    labels = split.labels[:count]
    with torch.no_grad():
        batches = [split.batch(indices)[0] for indices in torch.arange(count).split(_BATCH)]
        module = exported.module.to(device)
        logits = torch.cat([module(expand_channels(images.to(device), channels)).cpu() for images in batches])
    guesses = logits.argmax(1)
    loss = F.cross_entropy(logits, labels).item()
    accuracy = (guesses == labels).float().mean().item()
    print(f"{count} test images of {data.name}: accuracy {accuracy:.4f}, loss {loss:.4f}")
    names = split.class_names or tuple(str(i) for i in range(split.num_classes))
    picture = out_folder(options) / "predictions.png"
    draw(split.images[:_PICTURES], guesses[:_PICTURES].tolist(), labels[:_PICTURES].tolist(), names, picture)
    print(f"picture: {picture}")


def summarise(folder: Path, options: dict[str, str]) -> None:
    """Print three validation articles, their headlines and the model's summaries, then its loss."""
    import torch

    from fsdp_lab.workloads.hf.weights import load_whole
    from fsdp_lab.workloads.seq2seq import summaries

    device = torch.device(device_type(options.get("device", "auto"), torch.cuda.is_available()))
    files = {name: options[key] for name in ("root", "tokenizer") if (key := f"data.{name}") in options}
    data = summaries.read_val(recorded_data(folder), files)
    model = load_whole(folder).to(device)
    for article, headline, summary in summaries.summarise(model, data, _SUMMARIES):
        print(f"article:  {article}\nheadline: {headline}\nsummary:  {summary}\n", flush=True)
    loss = summaries.score(model, data)
    print(f"{len(data)} validation pairs: loss {loss:.4f}, perplexity {math.exp(min(loss, 700.0)):.2f}")


def recorded_data(folder: Path) -> DataConfig:
    """Return the data that an exported model was trained on.

    Raises:
        UserError: the folder does not record it, or the model is one of images.
    """
    try:
        data = DataConfig.of_keys(json.loads((folder / DATA_FILE).read_text())["data"], "data.")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{folder} has no readable {DATA_FILE}, which names the data that its model was trained on; give the "
            "folder model that a trial with task=seq2seq exported."
        ) from error
    if data.has_images:
        raise UserError(f"{folder} has an image model; load it with AutoModelForImageClassification.")
    return data


def device_type(wanted: str, cuda: bool) -> str:
    """Return `cpu` or `cuda`.

    Args:
        wanted: `auto`, `cpu` or `cuda`.

    Raises:
        UserError: a GPU is wanted and there is none.
    """
    if wanted == "cuda" and not cuda:
        raise UserError("device=cuda: PyTorch sees no GPU here; use device=cpu, or device=auto.")
    return "cuda" if cuda and wanted != "cpu" else "cpu"


def data_of(recorded: DataConfig, options: dict[str, str]) -> DataConfig:
    """Return the data that the model was trained on, from the folder in the options.

    The folder in the model's file is not used, because anyone may have chosen it.

    Raises:
        ConfigError: `data.download` is neither true nor false.
    """
    download = options.get("data.download", "true").lower()
    if download not in ("true", "false"):
        raise ConfigError(f"data.download={download} is not a truth value; use true or false.")
    if "root" not in recorded.arguments:
        return recorded
    files = {"root": options.get("data.root", "outputs/data"), "download": download == "true"}
    return dataclasses.replace(recorded, arguments={**recorded.arguments, **files})


def draw(images, guesses: list[int], labels: list[int], names: tuple[str, ...], path: Path) -> None:  # type: ignore[no-untyped-def]
    """Write a sheet of images uint8 `(N, C, H, W)`, each with the model's guess; wrong ones in red, with the truth."""
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
