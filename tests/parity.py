"""Sharded runs, plain scripts of the same workloads, and forecasts: what is compared in losses and bytes."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_lab.config import TrialConfig, part
from fsdp_lab.config.ranks import Ranks
from fsdp_lab.forecast.forecast import forecast_profile
from fsdp_lab.training.plain import run
from fsdp_lab.workloads.examples.language.llama import Llama
from fsdp_lab.workloads.examples.language.pydoc import PydocTokens
from fsdp_lab.workloads.examples.vision.models import vit
from fsdp_lab.workloads.examples.vision.synthetic import SyntheticImages
from tests.ranks import Memo, config, run_ranks
from tests.training.reference import Run, Script, image_loss, train_unsharded
from tests.workloads.hf import cases as hf
from tests.workloads.user import counting, odd, unusual
from tests.workloads.user.my_project import data, net

Tier = Literal["test", "ci", "full"]
Peaks = dict[str, dict[str, int]]  # place -> category -> bytes

# Weight decay inside Adam's gradient, and a large step: without them Adam would forgive a gradient that is wrong by a
# factor, and four steps would hardly move a ViT, whose head starts at zero.
VIT = ("optimizer=adam", "optimizer.lr=0.01", "optimizer.weight_decay=0.1")
SHARDINGS: dict[str, tuple[str, ...]] = {
    "ddp": ("sharding=ddp",),
    "root": ("sharding=root",),
    "per_block": ("sharding=per_block",),
    "per_layer": ("sharding=per_layer",),
    "size_based": ("sharding=size_based", "sharding.min_num_params=1000"),
}
PRECISIONS = ("bf16", "bf16_mixed", "bf16_pure", "fp16", "fp16_mixed", "grad_bf16")

COMPILED_TOLERANCE = 0.03  # of the memory of a compiled step; measured: 0 to 5e-3, of a ViT 2.3e-2
FP32_TOLERANCE = 1e-5  # measured: 5e-7
FIRST_STEPS_TOLERANCE = 1e-5  # measured: 2e-6, of the change of a ViT under Adam
# Of a computation or a reduction in 16 bits. In other models Adam makes a whole step of what is only rounding.
HALF_TOLERANCE = {"wide mlp": 5e-3}  # measured: 1.5e-3
ROUGH_TOLERANCE = 5e-2  # measured: 1e-2


@dataclass(frozen=True)
class Workload:
    """What a workload is: the words that choose it, and a plain script that trains it unsharded."""

    words: Sequence[str]
    train: Callable[[TrialConfig, str], Run]  # of the trial and a device


def _own(
    model: Callable[..., nn.Module], rows: Callable[..., Any], loss: Callable[..., Tensor], *words: str, task: str = ""
) -> Workload:
    """A user's workload. `task`: what is typed in place of the loss."""
    task = task or f"task=custom task.loss={loss.__module__}.{loss.__name__}"
    typed = [*_named("model", model), *_named("data", rows), *task.split(), *words]
    return Workload(typed, Script(model, rows, loss).train)


def _named(key: str, made: Callable[..., Any]) -> list[str]:
    """What is typed for a class or function, or a `partial` of it with keywords."""
    call = partial(made)
    arguments = (f"{key}.{name}={value}" for name, value in call.keywords.items())
    return [f"{key}._target_={call.func.__module__}.{call.func.__qualname__}", *arguments]


def _unusual(model: Callable[..., nn.Module], dtype: str = "float32") -> Workload:
    return _own(model, partial(unusual.Rows, dtype=dtype), unusual.loss, "training.epochs=3")


def _language(tied: bool, num_kv_heads: int = 2) -> Workload:
    sizes: dict[str, Any] = {
        "dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": num_kv_heads, "ffn_dim": 48, "max_seq_len": 16,
        "tied": tied,
    }  # fmt: skip
    build = partial(Llama, vocab_size=256, rope_theta=10000.0, norm_eps=1e-5, **sizes)
    words = ("task=language", "data.seq_len=16", *(f"model.{name}={value}" for name, value in sizes.items()))
    return Workload(words, Script(build, partial(PydocTokens, seq_len=16), next_token).train)


def next_token(model: nn.Module, rows: Tensor) -> Tensor:
    """The mean over the tokens that are told; -1 is none."""
    return _mean(model(rows[:, :-1].clamp(min=0)).flatten(0, 1).float(), rows[:, 1:].flatten())


def of_class(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return _mean(model(batch[0]), batch[1])


def labels_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits: Any = model(**batch).logits
    return _mean(logits.flatten(0, 1), batch["labels"].flatten())


def _mean(logits: Tensor, labels: Tensor) -> Tensor:
    """Over the labels of the batch, of which a row has any number; 0 if there are none."""
    counts = labels >= 0
    return F.cross_entropy(logits[counts], labels[counts], reduction="sum") / counts.sum().clamp(min=1)


class SomeLabels:
    """Of tokens or of classes. Three of four rows have no label, so whole steps have none; rows of tokens have one to
    seven labels."""

    def __init__(self, split: str, kind: str) -> None:
        generator, self.kind = torch.Generator().manual_seed(0), kind
        self.pixels = torch.randn(48, 64, generator=generator)
        self.tokens = torch.randint(7, (48, 9), generator=generator)

    def __len__(self) -> int:
        return 48

    def __getitem__(self, i: int) -> Any:
        if self.kind == "classes":
            return self.pixels[i], self.tokens[i, 0] if i % 4 == 0 else torch.tensor((-1, -100)[i % 2])
        row = self.tokens[i].clone()
        row[2 + i % 7 if i % 4 == 0 else 1 :] = -1
        return row


def _counted(pair: Callable[..., Any], mean: Callable[..., Tensor]) -> Workload:
    """Trained by a sum and a count of each microbatch; the script has the mean of the whole batch."""
    task = f"task=custom task.loss={pair.__module__}.{pair.__name__}"
    return _own(counting.Told, partial(SomeLabels, kind="tokens"), mean, *ALL, task=task)


def _noise() -> Workload:
    """The ViT on images that need no library but PyTorch."""
    sizes = {"image_size": 28, "num_channels": 1, "num_classes": 10}
    build = partial(vit, patch_size=7, num_layers=2, num_heads=2, hidden_dim=64, mlp_dim=128, **sizes)
    words = ("model=vit_tiny", "model.num_layers=2", "data=synthetic", "data.num_train=128", "data.num_val=30")
    return Workload(words, Script(build, partial(SyntheticImages, **sizes), image_loss).train)


OF_TRANSFORMERS = ("hf gpt2", "hf llama", "hf qwen3", "hf t5", "hf vit")
ALL = ("data.num_train=null", "data.num_val=null")
EXPORTED = ("training.epochs=2", "export=true")  # their weights are compared, too
NET = partial(net.Net, width=16), data.Corpus, net.loss  # of the documentation; its validation split has 31 items
WORKLOADS: dict[str, Workload] = {
    "mlp": Workload(("model=mlp", "model.image_size=8", "model.hidden_dim=32", "model.num_layers=2"), train_unsharded),
    "wide mlp": Workload(("model=mlp",), train_unsharded),
    "vit": Workload(("model=vit_tiny", "model.num_layers=2"), train_unsharded),
    "noise": _noise(),
    "language": _language(tied=False),
    "language, tied": _language(tied=True),
    "language, 4 kv heads": _language(tied=False, num_kv_heads=4),
    "user": _own(odd.Odd, odd.Rows, odd.loss, *EXPORTED),
    "user, with state": _own(odd.Stateful, odd.Rows, odd.loss, *EXPORTED),
    "net": _own(*NET, *ALL),
    "model_loss": _own(partial(net.WithLoss, width=16), *NET[1:], *ALL, task="task=model_loss"),
    "complex": _unusual(unusual.complex_filters),
    "float64": _unusual(unusual.in_float64, "float64"),
    "transposed": _unusual(unusual.transposed),
    "some share a module": _unusual(unusual.some_share_a_module),
    "frozen in bfloat16": _unusual(unusual.frozen_bfloat16),
    "objects": _unusual(partial(unusual.returns, what="nested")),
    "changed in place": _unusual(partial(unusual.returns, what="in_place")),
    "kept": _unusual(partial(unusual.keeps, of_weight=False)),
    "methods": _unusual(unusual.methods),
    "some tokens": _own(net.Reader, partial(SomeLabels, kind="tokens"), next_token, *ALL, task="task=language"),
    "some classes": _own(
        partial(net.digits, width=8), partial(SomeLabels, kind="classes"), of_class, *ALL, task="task=classification"
    ),
    "counted": _counted(counting.loss, counting.mean),
    "weighted": _counted(counting.weighted, counting.weighted_mean),
    "seq2seq": _own(
        partial(odd.Summariser, vocab_size=20), odd.Ragged, labels_of, "training.global_batch_size=8",
        task="task=seq2seq",
    ),
    **{name: Workload(hf.WORDS[name[3:]], hf.script(name[3:]).train) for name in OF_TRANSFORMERS},
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One setting of one workload, on some ranks; `tier`: the first that compares it."""

    workload: str
    cell: str
    ranks: int = 2
    tier: Tier = "test"

    def __str__(self) -> str:
        return f"{self.workload}: {self.cell}" + (f" on {self.ranks}" if self.ranks != 2 else "")

    @property
    def words(self) -> list[str]:
        """What is typed."""
        followed = "memory_profile=peaks" if self.has_forecast else "memory_profile=off"
        return [*WORKLOADS[self.workload].words, followed, *VIT, *self.cell.split()]

    @property
    def tolerance(self) -> float:
        """How far a step's loss may be from the script's."""
        if any(f"precision={precision}" in self.cell.split() for precision in PRECISIONS):
            return HALF_TOLERANCE.get(self.workload, ROUGH_TOLERANCE)
        return FP32_TOLERANCE

    @property
    def has_forecast(self) -> bool:
        """Whether its memory is followed, and forecast."""
        return "memory_profile=off" not in self.cell

    @property
    def forecast_ranks(self) -> int:
        """How many of the ranks have their memory compared: in the larger models one, but for the last tier."""
        return self.ranks if self.workload == "mlp" or self.tier == "full" else 1


@cache
def unsharded(row: Row, device: str = "cpu") -> Run:
    """Train a row's workload by its plain script; see `Script.train`."""
    torch.set_num_threads(1)
    return WORKLOADS[row.workload].train(config(*row.words), device)


@cache
def first_steps(row: Row) -> dict[str, float]:
    """What the plain loop of the package has of a row."""
    torch.set_num_threads(1)
    trial = part(config(*row.words), TrialConfig)
    result = run(trial, Ranks.of(trial.sharding, row.ranks).dp)
    assert not result["missing"], result["missing"]
    return result["figures"]  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Result:
    """What a rank reports of a trial, and held in the second step."""

    losses: list[float]
    first: dict[str, float]  # metrics of the first epoch
    metrics: dict[str, float]  # of the last epoch
    weights: dict[str, Tensor] | None
    peaks: Peaks | None


def train_each(cases: list[list[str]]) -> list[Result]:
    """On one rank."""
    from fsdp_lab.training.train import train

    results = []
    for words in cases:
        losses, memo = list[float](), Memo()
        with tempfile.TemporaryDirectory() as folder:
            train(config(*words), Path(folder), memo, losses.extend)
            exported, followed = Path(folder, "model.pt"), [*Path(folder).glob("memory_peaks_rank*.json")]
            weights = torch.load(exported, weights_only=True)["state_dict"] if exported.is_file() else None
            content = json.loads(followed[0].read_text()) if followed else {"step": 2, "peaks": None}
            assert content["step"] == 2
        results.append(Result(losses, memo.reported[0], memo.reported[-1], weights, content["peaks"]))
    return results


def train_rows(rows: Sequence[Row], ranks: int) -> dict[Row, tuple[Result, ...]]:
    """Train rows in one process group: what each rank has of each."""
    by_rank = run_ranks(ranks, train_each, [row.words for row in rows])
    return dict(zip(rows, zip(*by_rank, strict=True), strict=True))


def forecast_differences(words: Sequence[str], world_size: int, results: Sequence[Result]) -> list[str]:
    """Return where the first ranks of a trial held other bytes than forecast."""
    found = []
    for rank, result in enumerate(results):
        forecast, measured = forecast_profile(config(*words), world_size, cuda=False, rank=rank).peaks, result.peaks
        same = forecast == measured
        if measured and "compile=true" in words:  # allocators do not report what an allocation is for
            totals = forecast["device"]["total"], measured["device"]["total"]
            same = math.isclose(*totals, rel_tol=COMPILED_TOLERANCE)
        if not same:
            found.append(f"rank {rank} {' '.join(words)}: measured {measured}, forecast {forecast}")
    return found


def differences(cases: list[list[str]]) -> list[str]:
    """Train each case for two steps on two ranks; return where one held other bytes than forecast."""
    measured = [["memory_profile=peaks", "training.max_steps=2", *words] for words in cases]
    by_case = zip(*run_ranks(2, train_each, measured), strict=True)
    found = (forecast_differences(words, 2, results) for words, results in zip(cases, by_case, strict=True))
    return [difference for each in found for difference in each]
