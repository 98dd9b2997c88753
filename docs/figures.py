"""Draws the figures of `concepts.md`, by forecasts, and of the README, from the table that it shows.

python docs/figures.py               all of them, into docs/figures
python docs/figures.py offload       one
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / "figures"
# What all figures share, and what each one varies.
MODEL = ("model=llama3_1b", "data.seq_len=4096", "training.global_batch_size=${per_worker:2}")
MACHINE = ("cluster.num_workers=8", "forecast.device=h100_sxm")
PLAIN = {
    "sharding": "per_block",
    "precision": "bf16_mixed",
    "offload": "none",
    "reshard_after_forward": "always",
    "activation_checkpointing": "none",
}
FIGURES = {
    "sharding": "ddp,root,per_block",
    "reshard_after_forward": "always,never",
    "precision": "fp32,bf16_mixed,bf16",
    "offload": "none,cpu",
    "activation_checkpointing": "none,selective,full",
}
_COLOURS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#bbbbbb")  # told apart by everybody (Paul Tol)


def words(axis: str) -> list[str]:
    """Return the words of the forecast behind a figure."""
    return [*MODEL, *(f"{key}={value}" for key, value in {**PLAIN, axis: FIGURES[axis]}.items()), *MACHINE]


def command(axis: str) -> str:
    """Return the command that prints a figure's values as a table."""
    return f"python -m fsdp_lab.forecast -m {shlex.join(words(axis))}"


def draw(axis: str) -> None:
    """Forecast the values of an axis and write the figure."""
    import matplotlib.pyplot as plt

    from fsdp_lab.api import forecast
    from fsdp_lab.forecast.table import COLUMNS

    found = forecast(words(axis), quiet=True).frame().set_index(axis).loc[FIGURES[axis].split(",")[::-1]]
    parts = {name: found[[f"{column}_bytes" for column in columns]].sum(axis=1) for name, columns in COLUMNS.items()}
    plt.rcParams.update({"svg.hashsalt": axis, "svg.fonttype": "none", "font.size": 9})
    figure, (memory, speed) = plt.subplots(1, 2, figsize=(9, 0.8 + 0.45 * len(found)), width_ratios=[2, 1])
    left = 0.0 * found["peak_bytes"]
    for (name, sizes), colour in zip(parts.items(), _COLOURS, strict=True):
        memory.barh(found.index, sizes / 2**30, left=left, color=colour, label=name, height=0.6)
        left += sizes / 2**30
    memory.set_xlabel("GiB of tensors at the peak of one GPU")
    each = found["tokens_per_s_of_all"].fillna(0) / found["cluster.num_workers"]
    speed.barh(found.index, each, color="#777777", height=0.6)
    speed.set(xlabel="predicted tokens/s of one GPU", yticks=[])
    for axes in (memory, speed):
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*memory.get_legend_handles_labels(), ncols=6, loc="upper center", frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0, 1, 0.9))
    FOLDER.mkdir(exist_ok=True)
    figure.savefig(FOLDER / f"{axis}.svg", metadata={"Date": None})
    plt.close(figure)
    print(f"{FOLDER / axis}.svg   {command(axis)}")


def readme_rows() -> list[tuple[str, float, float]]:
    """Return setting, samples/s and MiB at the peak of each row of the table that the README shows."""
    lines = (FOLDER.parents[1] / "README.md").read_text().partition("`make sweep` prints:")[2].splitlines()
    cells = [line.translate(str.maketrans("", "", ">*,")).split() for line in lines]
    rows = [each for each in cells if len(each) == 10 and each[0].isdecimal()]
    return [(f"{each[1]}, {each[2]}", float(each[7]), float(each[8])) for each in rows]


def draw_sweep() -> None:
    """Draw speed against peak memory of the README's sweep."""
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "sweep", "svg.fonttype": "none", "font.size": 9})
    figure, axes = plt.subplots(figsize=(6, 2.4))
    for name, speed, mib in readme_rows():
        axes.scatter(mib, speed, color=_COLOURS[0])
        axes.annotate(
            f"{name}: {speed:,.0f}", (mib, speed), xytext=(-6, 0), textcoords="offset points", ha="right", va="center"
        )
    axes.set(xlabel="MiB at the peak", ylabel="samples/s", ylim=(500, 1050), xlim=(7.6, 8.9))
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(FOLDER / "sweep.svg", metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    for name in sys.argv[1:] or [*FIGURES, "sweep"]:
        draw_sweep() if name == "sweep" else draw(name)
