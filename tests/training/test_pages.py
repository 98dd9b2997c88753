"""The GAN and the stream of docs/recipes.md train alike in every sharding: as a loop by hand, and as the plain loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from fsdp_lab.config.metrics import CHECK_VAL_LOSS, EARLY_LOSS, EVAL_LOSS, FIRST_LOSS
from fsdp_lab.training.plain import run as plain_loop
from fsdp_lab.workloads.examples.vision.digits import Digits
from tests.ranks import config, run_ranks, train_all
from tests.training import pages
from tests.training.hand import Hand

pytestmark = pytest.mark.ci
PAGE: Any = pages
OF = "tests.training.pages"
GAN = f"model._target_={OF}.Gan task=custom task.step={OF}.step task.loss={OF}.loss optimizer.lr=0.002"
STREAM = (
    f"data.loader={OF}.loader data.length=32 data.num_train=null data.num_val=null task=language training.epochs=2 "
    "training.epoch_steps=4 training.global_batch_size=16"
)
SHARDINGS = ("ddp", "root", "per_block", "per_layer", "root sharding.api=fsdp1", "per_block sharding.api=fsdp1")


def words(case: str, sharding: str) -> list[str]:
    blocks = " model.block_classes=[torch.nn.Linear]" if case == GAN else ""
    return f"{case} sharding={sharding}{blocks}".split()


def test_the_gan_trains_as_a_loop_by_hand_in_every_sharding() -> None:
    assert len(pages.CODE["gan"].strip().splitlines()) <= 30 and "fsdp_lab" not in pages.CODE["gan"]
    torch.manual_seed(0)
    parts, items, expected = dict(PAGE.Gan().named_children()), Digits("train"), list[float]()
    optimizers = {name: torch.optim.Adam(part.parameters(), 0.002) for name, part in parts.items()}
    for indices in torch.randperm(128, generator=torch.Generator().manual_seed(0)).split(32):
        own = [[default_collate([items[int(i)] for i in half])] for half in indices.view(2, -1)]
        hand = Hand(optimizers, own, len(expected), None)
        PAGE.step(parts, hand)
        expected.append(hand.loss)
    trained = run_ranks(2, train_all, [words(GAN, sharding) for sharding in SHARDINGS])[0]
    plain = plain_loop(config(*words(GAN, "root")), parts=2)
    for sharding, (losses, reported) in zip(SHARDINGS, trained, strict=True):
        assert losses == pytest.approx(expected, rel=1e-5), sharding
        assert reported[0][EVAL_LOSS] == pytest.approx(plain["figures"][EVAL_LOSS], rel=1e-6), sharding


def test_the_stream_trains_as_the_plain_loop_in_every_sharding() -> None:
    assert len(pages.CODE["stream"].splitlines()) <= 25 and "fsdp_lab" not in pages.CODE["stream"]
    trained = run_ranks(2, train_all, [words(STREAM, sharding) for sharding in SHARDINGS])[0]
    plain = plain_loop(config(*words(STREAM, "root")), parts=2)
    assert plain["missing"] == "" and plain["steps"] == 3
    for sharding, (losses, reported) in zip(SHARDINGS, trained, strict=True):
        assert len(losses) == 8 and losses == pytest.approx(trained[0][0], rel=1e-5), sharding
        for figure in (EVAL_LOSS, FIRST_LOSS, EARLY_LOSS, CHECK_VAL_LOSS):
            assert reported[0][figure] == pytest.approx(plain["figures"][figure], rel=1e-5), (sharding, figure)
