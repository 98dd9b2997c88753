"""Labels that do not count: a step's loss is the mean over those of its global batch that do, however it is divided."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.ranks import config, run_ranks, selected, train_all
from tests.training.reference import apart, batches, build_optimizer

COUNT, SIZE, WIDTH, KINDS = 24, 8, 6, 5
WORDS = [f"data._target_={__name__}.Rows", "data.num_train=null", "data.num_val=null", "training.epochs=2",
         f"training.global_batch_size={SIZE}", "optimizer=sgd", "optimizer.lr=0.1"]  # fmt: skip
TASKS = {
    "language": ["task=language", f"model._target_={__name__}.Tokens", "data.kind=tokens"],
    "classification": ["task=classification", f"model._target_={__name__}.Classes", "data.kind=classes"],
}
CASES = {
    f"{task}, {words}": [*WORDS, *TASKS[task], *words.split()]
    for task in TASKS
    for words in ("sharding=per_block", "sharding=ddp training.grad_accum_steps=2", "training.grad_accum_steps=4")
}


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(KINDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, KINDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = x + block(x).tanh()
        out: Tensor = self.head(x)
        return out


class Classes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, KINDS)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        out: Tensor = self.head(x)
        return out


class Rows:
    """Each row has another number of labels, and those of the second step of the first epoch have none at all."""

    def __init__(self, split: str, kind: str, none: bool = False) -> None:
        draw = torch.Generator().manual_seed(0)
        ids = torch.randint(KINDS, (COUNT, WIDTH + 1), generator=draw)
        self.x, self.labels, self.kind = torch.randn(COUNT, WIDTH, generator=draw), ids[:, 0], kind
        for i in range(COUNT):
            ids[i, 1 + i % WIDTH :] = -1
        self.labels[::3], self.labels[1::6] = -1, -100
        without = batches(config(*WORDS), COUNT)[1]
        ids[without, 1:], self.labels[without] = -1, -1
        if none and split == "val":
            ids[:, 1:] = -1
        self.ids = ids

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, i: int) -> Any:
        return self.ids[i] if self.kind == "tokens" else (self.x[i], self.labels[i])


def plain(task: str) -> list[float]:
    """The losses of one process in plain PyTorch: a sum over labels, divided by their number."""
    trial, losses = config(*WORDS), list[float]()
    rows = Rows("train", "tokens" if task == "language" else "classes")
    torch.manual_seed(0)
    model: nn.Module = Tokens() if task == "language" else Classes()
    optimizer = build_optimizer(model, trial)
    for indices in batches(trial, COUNT):
        ids, labels = rows.ids[indices], rows.labels[indices]
        inputs = ids[:, :-1].clamp(min=0) if task == "language" else rows.x[indices]
        labels = ids[:, 1:].flatten() if task == "language" else labels
        logits = model(inputs).flatten(0, -2)
        pairs = zip(logits, labels, strict=True)
        terms = [F.cross_entropy(each[None], label[None]) for each, label in pairs if label >= 0]
        loss = torch.stack(terms).mean() if terms else (logits * 0).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest) -> dict[str, tuple[list[float], list[dict[str, float]]]]:
    names = selected(request, "case")
    return dict(zip(names, run_ranks(2, train_all, [CASES[name] for name in names])[0], strict=True))


@pytest.mark.parametrize("case", CASES)
def test_the_mean_is_over_all_labels_of_the_global_batch(trained: Any, case: str) -> None:
    losses, (first, _) = trained[case]
    expected = plain(case.partition(",")[0])
    assert expected[1] == 0 and min(expected[:1] + expected[2:]) > 0.01, "one step has no label"
    assert apart(losses, expected) <= 1e-5
    assert first["train/loss"] == pytest.approx(sum(expected[:3]) / 3, abs=1e-5)


def test_a_validation_without_a_label_is_refused_by_name() -> None:
    with pytest.raises(AssertionError, match="UserError: the validation split has no label that counts"):
        run_ranks(1, train_all, [[*WORDS, *TASKS["language"], "data.none=true"]])
