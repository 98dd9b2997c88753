"""Sharded runs, plain scripts of the same workloads, and forecasts: what is compared in losses and bytes."""

from __future__ import annotations

import json
import math
import operator
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_lab.config import TrialConfig
from fsdp_lab.forecast.forecast import forecast_profile
from fsdp_lab.workloads.language.llama import Llama
from fsdp_lab.workloads.language.pydoc import PydocTokens
from fsdp_lab.workloads.seq2seq.pydoc import PydocSummaries
from fsdp_lab.workloads.vision.models import vit
from fsdp_lab.workloads.vision.synthetic import SyntheticImages
from tests.ranks import Memo, config, run_ranks
from tests.training.reference import Run, Script, train_unsharded
from tests.workloads.hf import cases as hf
from tests.workloads.user import odd, unusual
from tests.workloads.user.my_project import data, net

Tier = Literal["test", "ci", "full"]
Peaks = dict[str, dict[str, int]]  # place -> category -> bytes

# Weight decay inside Adam's gradient, and a large step: without them Adam would forgive a gradient that is wrong by a
# factor, and four steps would hardly move a ViT, whose head starts at zero.
VIT = ("optimizer=adam", "optimizer.lr=0.01", "optimizer.weight_decay=0.1")
SGD = "optimizer=sgd optimizer.weight_decay=0"
CLIP = "training.max_grad_norm=0.1"

SHARDINGS: dict[str, tuple[str, ...]] = {
    "ddp": ("sharding=ddp",),
    "root": ("sharding=root",),
    "per_block": ("sharding=per_block",),
    "per_layer": ("sharding=per_layer",),
    "size_based": ("sharding=size_based", "sharding.min_num_params=1000"),
}
RESHARDS = (
    *(f"reshard_after_forward={policy}" for policy in ("always", "never", "default")),
    *(f"reshard_after_forward=to_size reshard_after_forward.size={size}" for size in (1, 2)),
)
PRECISIONS = ("bf16", "bf16_mixed", "fp16", "fp16_mixed", "grad_bf16")

COMPILED_TOLERANCE = 0.03  # of the memory of a compiled step; measured: 0 to 5e-3, of a ViT 2.3e-2
FP32_TOLERANCE = 1e-5  # measured: 5e-7
# Of a computation or a reduction in 16 bits. In other models Adam makes a whole step of what is only rounding.
HALF_TOLERANCE = {"wide mlp": 5e-3}  # measured: 1.5e-3
ROUGH_TOLERANCE = 5e-2  # measured: 1e-2


@dataclass(frozen=True)
class Workload:
    """What a workload is: the words that choose it, and a plain script that trains it unsharded."""

    words: tuple[str, ...]
    train: Callable[[TrialConfig, str], Run]  # of the trial and a device


def next_token(model: nn.Module, rows: Tensor) -> Tensor:
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def labels_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean over the labels of the batch, of which a row has any number."""
    logits: Any = model(**batch).logits
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


def _language(tied: bool) -> Workload:
    sizes: dict[str, Any] = {
        "dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 48, "max_seq_len": 16, "tied": tied,
    }  # fmt: skip
    build = partial(Llama, vocab_size=256, rope_theta=10000.0, norm_eps=1e-5, **sizes)
    words = ("task=language", "data.seq_len=16", *(f"model.{name}={value}" for name, value in sizes.items()))
    return Workload(words, Script(build, partial(PydocTokens, seq_len=16), next_token).train)


def _user(model: type[nn.Module]) -> Workload:
    """Its weights are compared, too."""
    here = odd.__name__
    words = (f"model._target_={here}.{model.__name__}", f"data._target_={here}.Rows", f"task.loss={here}.loss")
    return Workload((*words, "training.epochs=2", "export=true"), Script(model, odd.Rows, odd.loss).train)


def _net(model: str, *words: str) -> Workload:
    """The example of the documentation, whose validation split has 31 items."""
    project = net.__name__.rpartition(".")[0]
    words = (f"model._target_={project}.net.{model}", "model.width=16", f"data._target_={project}.data.Corpus", *words)
    plain = Script(partial(net.Net, width=16), data.Corpus, net.loss)
    return Workload((*words, "data.num_train=null", "data.num_val=null"), plain.train)


def _unusual(model: str, dtype: str = "float32", **arguments: Any) -> Workload:
    here = unusual.__name__
    given = (f"model.{name}={value}" for name, value in arguments.items())
    words = (f"model._target_={here}.{model}", *given, f"data._target_={here}.Rows", f"data.dtype={dtype}")
    build, rows = partial(getattr(unusual, model), **arguments), partial(unusual.Rows, dtype=dtype)
    words = (*words, f"task.loss={here}.loss", "training.epochs=3")
    return Workload(words, Script(build, rows, unusual.loss).train)


def _seq2seq() -> Workload:
    here = odd.__name__
    words = (f"model._target_={here}.Summariser", "model.vocab_size=20", f"data._target_={here}.Ragged", "task=seq2seq")
    plain = Script(partial(odd.Summariser, 20), odd.Ragged, labels_of)
    return Workload((*words, "training.global_batch_size=8"), plain.train)


T5_SIZES = {"d_model": 16, "d_kv": 4, "d_ff": 24, "dropout_rate": 0.0}


def t5() -> nn.Module:
    """The model of `t5_tiny` at these sizes, its values written down again."""
    import transformers

    plain = transformers.T5Config(
        vocab_size=384, num_layers=2, num_decoder_layers=2, num_heads=4, feed_forward_proj="gated-gelu", pad_token_id=0,
        eos_token_id=1, decoder_start_token_id=0, tie_word_embeddings=True, **T5_SIZES,
    )  # fmt: skip
    model: nn.Module = transformers.AutoModelForSeq2SeqLM.from_config(plain, dtype=torch.float32)
    return model


def _t5_tiny() -> Workload:
    sizes = (f"model.{name}={value}" for name, value in T5_SIZES.items())
    batches = ("data.num_train=64", "training.global_batch_size=16")
    words = ("task=seq2seq", "data.source_len=24", "data.target_len=12", *batches, *sizes)
    pairs = partial(PydocSummaries, source_len=24, target_len=12)
    return Workload(words, Script(t5, pairs, hf.target_loss).train)


def _noise() -> Workload:
    """The ViT on images that need no library but PyTorch."""
    sizes = {"image_size": 28, "num_channels": 1, "num_classes": 10}
    build = partial(vit, patch_size=7, num_layers=2, num_heads=2, hidden_dim=64, mlp_dim=128, **sizes)
    plain = Script(build, partial(SyntheticImages, **sizes), image_loss)
    words = ("model=vit_tiny", "model.num_layers=2", "data=synthetic", "data.num_train=128", "data.num_val=30")
    return Workload(words, plain.train)


def image_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


OF_TRANSFORMERS = ("hf gpt2", "hf llama", "hf qwen3", "hf t5", "hf vit")
WORKLOADS: dict[str, Workload] = {
    "mlp": Workload(("model=mlp", "model.image_size=8", "model.hidden_dim=32", "model.num_layers=2"), train_unsharded),
    "wide mlp": Workload(("model=mlp",), train_unsharded),
    "vit": Workload(("model=vit_tiny", "model.num_layers=2"), train_unsharded),
    "noise": _noise(),
    "language": _language(tied=False),
    "language, tied": _language(tied=True),
    "user": _user(odd.Odd),
    "user, as T5": _user(odd.Translator),
    "user, with state": _user(odd.Stateful),
    "net": _net("Net", f"task.loss={net.__name__}.loss"),
    "model_loss": _net("WithLoss", "task=model_loss"),
    "complex": _unusual("complex_filters"),
    "float64": _unusual("in_float64", "float64"),
    "transposed": _unusual("transposed"),
    "some share a module": _unusual("some_share_a_module"),
    "frozen in bfloat16": _unusual("frozen_bfloat16"),
    "objects": _unusual("returns", what="nested"),
    "changed in place": _unusual("returns", what="in_place"),
    "kept": _unusual("keeps", of_weight=False),
    "methods": _unusual("methods"),
    "seq2seq": _seq2seq(),
    "t5_tiny": _t5_tiny(),
    **{name: Workload(tuple(hf.WORDS[name[3:]]), hf.script(name[3:]).train) for name in OF_TRANSFORMERS},
}
NEED_TRANSFORMERS = (*OF_TRANSFORMERS, "t5_tiny")


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


@dataclass(frozen=True)
class Result:
    """What the first rank reports of a row, and what each rank held in the second step."""

    losses: list[float]
    metrics: dict[str, float]  # of the last epoch
    weights: dict[str, Tensor] | None
    peaks: list[Peaks | None]


def train_rows(rows: Sequence[Row], ranks: int) -> dict[Row, Result]:
    """Train rows in one process group."""
    by_rank = run_ranks(ranks, train_each, [row.words for row in rows])
    results = {}
    for row, of_row in zip(rows, zip(*by_rank, strict=True), strict=True):
        (losses, metrics, weights), *_ = (learned for learned, _ in of_row)
        for rank, (learned, _) in enumerate(of_row):
            assert learned[0] == losses, f"rank {rank} reports other losses than rank 0: {row}"
        results[row] = Result(losses, metrics, weights, [peaks for _, peaks in of_row])
    return results


def train_each(cases: list[list[str]]) -> list[tuple[Any, Peaks | None]]:
    """On one rank: of each case `((losses, last metrics, exported weights), peaks of the second step)`."""
    from fsdp_lab.training.train import train

    results = []
    for words in cases:
        losses, memo = list[float](), Memo()
        with tempfile.TemporaryDirectory() as folder:
            train(config(*words), Path(folder), memo, losses.extend)
            file = Path(folder, "model.pt")
            weights = torch.load(file, weights_only=True)["state_dict"] if file.is_file() else None
            results.append(((losses, memo.reported[-1], weights), _read_peaks(Path(folder))))
    return results


def _read_peaks(folder: Path) -> Peaks | None:
    for file in folder.glob("memory_peaks_rank*.json"):
        content = json.loads(file.read_text())
        assert content["step"] == 2
        peaks: Peaks = content["peaks"]
        return peaks
    return None


# What a float32 run on one process depends on; the other settings must change nothing.
_MATTERS = ("model", "optimizer", "training", "data", "task")
_NO_MATTER = (
    "training.grad_accum", "training.sync_each", "optimizer.implementation", "data.loader", "task.loss_chunks",
    "model.as_dict", "model.block_classes", "model.forward_methods",
)  # fmt: skip


def unsharded(row: Row, device: str = "cpu") -> Run:
    """Train a row's workload by its plain script; see `Script.train`."""
    keys = (word for word in row.cell.split() if word.split("=")[0].split(".")[0] in _MATTERS)
    return _unsharded(row.workload, tuple(word for word in keys if not word.startswith(_NO_MATTER)), device)


@cache
def _unsharded(workload: str, words: tuple[str, ...], device: str) -> Run:
    torch.set_num_threads(1)
    known = WORKLOADS[workload]
    return known.train(config(*known.words, *VIT, *words), device)


def _close(forecast: Peaks, measured: Peaks) -> bool:
    """Whether the totals of a compiled step agree: allocators do not report what an allocation is for."""
    return math.isclose(forecast["device"]["total"], measured["device"]["total"], rel_tol=COMPILED_TOLERANCE)


def forecast_differences(words: Sequence[str], ranks: int, peaks: Iterable[Peaks | None]) -> list[str]:
    """Return where the first ranks of a trial held other bytes than forecast."""
    found = []
    for rank, measured in enumerate(peaks):
        forecast = forecast_profile(config(*words), ranks, cuda=False, rank=rank).peaks
        same = _close if "compile=true" in words else operator.eq
        if measured is None or not same(forecast, measured):
            found.append(f"rank {rank} {' '.join(words)}: measured {measured}, forecast {forecast}")
    return found


def differences(cases: list[list[str]], world_size: int = 2, ranks: int | None = None) -> list[str]:
    """Train each case for two steps; return where the first `ranks`, or all, held other bytes than forecast."""
    measure = ["memory_profile=peaks", "training.max_steps=2"]
    by_rank = run_ranks(world_size, train_each, [[*measure, *words] for words in cases])[:ranks]
    of_cases = zip(*([peaks for _, peaks in results] for results in by_rank), strict=True)
    found = (forecast_differences(words, world_size, each) for words, each in zip(cases, of_cases, strict=True))
    return [difference for each in found for difference in each]
