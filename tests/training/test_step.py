"""A step of the user's with several losses and optimizers trains as a loop by hand does, in every sharding."""

from __future__ import annotations

import os
import re
import tempfile
import textwrap
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import default_collate

from fsdp_lab.config import ConfigError
from fsdp_lab.config.metrics import EVAL_LOSS, FIRST_LOSS
from fsdp_lab.config.rules import check_trial
from fsdp_lab.report.pytorch import to_pytorch
from fsdp_lab.training.layout import Layout
from fsdp_lab.training.plain import run as plain_loop
from fsdp_lab.training.train import train
from tests import forked
from tests.conftest import HERE, ROOT
from tests.parity import differences
from tests.ranks import Memo, config, outcomes, run_ranks, train_all
from tests.servers import lay_store
from tests.training.checkpoints import Job, train_in
from tests.training.hand import Hand

NUM_STEPS = 4  # of an epoch


class Rows:
    """Vectors and their signs."""

    def __init__(self, split: str) -> None:
        self.x = torch.randn(64, 8, generator=torch.Generator().manual_seed(len(split)))

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i], (self.x[i].sum() > 0).float()


class Block(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x))


class Stack(nn.Module):
    def __init__(self, num_blocks: int, num_out: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(8, 8) for _ in range(num_blocks)])
        self.head = nn.Linear(8, num_out)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = Stack(2, 8), Stack(3, 1)


def real(logits: Tensor, is_real: float) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, is_real))


def gan_step(parts: Mapping[str, Any], run: Any) -> dict[str, Tensor]:
    """The discriminator sees the generator's rows detached, as most scripts have it: DDP alone would not go on."""
    generator, discriminator = parts["generator"], parts["discriminator"]

    def of_discriminator(batch: Any) -> Tensor:
        made = generator(torch.randn_like(batch[0])).detach()
        return real(discriminator(batch[0]), 1) + real(discriminator(made), 0)

    def of_generator(batch: Any) -> Tensor:
        return real(discriminator(generator(torch.randn_like(batch[0]))), 1)

    return {
        "discriminator": run.minimize("discriminator", of_discriminator),
        "generator": run.minimize("generator", of_generator),
    }


def gan_loss(parts: Mapping[str, Any], batch: Any) -> Tensor:
    return real(parts["discriminator"](parts["generator"](batch[0])), 1)


def gan_optimizers(parts: Mapping[str, nn.Module], lr: float) -> dict[str, torch.optim.Optimizer]:
    return {
        "generator": torch.optim.Adam(parts["generator"].parameters(), lr, betas=(0.5, 0.999)),
        "discriminator": torch.optim.SGD(parts["discriminator"].parameters(), 2 * lr),
    }


class Distillation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = Stack(3, 4).requires_grad_(False), Stack(2, 4)


def distil_step(parts: Mapping[str, Any], run: Any) -> None:
    def of_student(batch: Any) -> tuple[Tensor, Tensor]:
        targets = parts["teacher"](batch[0]).softmax(-1)
        return F.cross_entropy(parts["student"](batch[0]), targets, reduction="sum"), torch.tensor(len(targets))

    run.minimize("student", of_student)


def distil_loss(parts: Mapping[str, Any], batch: Any) -> Tensor:
    return F.cross_entropy(parts["student"](batch[0]), parts["teacher"](batch[0]).softmax(-1))


class ActorCritic(nn.Module):
    """The trunk is the actor's, and the critic reads what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.actor, self.critic = Stack(2, 8), nn.Linear(8, 2), Stack(1, 1)
        self.average = Stack(1, 1).requires_grad_(False)


def values_of(parts: Mapping[str, Any], batch: Any, critic: str = "critic") -> Tensor:
    with torch.no_grad():
        features = parts["trunk"](batch[0])
    values: Tensor = parts[critic](features)
    return values.squeeze(-1)


def actor_step(parts: Mapping[str, Any], run: Any) -> dict[str, Tensor]:
    """Twice the critic's, each with the average of earlier ones as a target."""

    def of_critic(batch: Any) -> Tensor:
        with torch.no_grad():
            targets = batch[1] + 0.5 * values_of(parts, batch, "average")
        return F.mse_loss(values_of(parts, batch), targets)

    def of_actor(batch: Any) -> Tensor:
        with torch.no_grad():
            advantage = batch[1] - values_of(parts, batch)
        chosen = parts["actor"](parts["trunk"](batch[0])).log_softmax(-1)[:, 0]
        return -(chosen * advantage).mean()

    run.minimize("critic", of_critic)
    return {"critic": run.minimize("critic", of_critic), "actor": run.minimize("actor", of_actor)}


def actor_loss(parts: Mapping[str, Any], batch: Any) -> Tensor:
    return F.mse_loss(values_of(parts, batch), batch[1]) + parts["actor"](parts["trunk"](batch[0])).square().mean()


def actor_optimizers(parts: Mapping[str, nn.Module], lr: float) -> dict[str, torch.optim.Optimizer]:
    acts = [*parts["trunk"].parameters(), *parts["actor"].parameters()]
    return {"actor": torch.optim.Adam(acts, lr), "critic": torch.optim.Adam(parts["critic"].parameters(), 0.02)}


class Rare(nn.Module):
    """A part that the first microbatch of a step alone uses, one of one element, and a teacher in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.rare, self.scale = Stack(2, 4), Stack(1, 4), nn.Linear(1, 1, bias=False)
        self.teacher = nn.Sequential(Stack(1, 4), nn.Dropout(0.5)).requires_grad_(False).eval()


def rare_step(parts: Mapping[str, Any], run: Any) -> None:
    seen = list[int]()

    def of_all(batch: Any) -> Tensor:
        seen.append(len(batch[0]))
        out = parts["body"](batch[0]) + (parts["rare"](batch[0]) if len(seen) % (2) == 1 else 0)
        with torch.no_grad():
            target = parts["teacher"](batch[0])
        return F.mse_loss(parts["scale"](out.mean(-1, keepdim=True)), target.mean(-1, keepdim=True))

    run.minimize("all", of_all)


def rare_loss(parts: Mapping[str, Any], batch: Any) -> Tensor:
    return F.mse_loss(parts["body"](batch[0]), parts["teacher"](batch[0]))


def rare_optimizers(parts: Mapping[str, nn.Module], lr: float) -> dict[str, torch.optim.Optimizer]:
    trained = [p for part in parts.values() for p in part.parameters() if p.requires_grad]
    return {"all": torch.optim.SGD(trained, lr, momentum=0.9)}


def average(parts: Mapping[str, Any], step: int) -> None:
    for mean, weight in zip(parts["average"].parameters(), parts["critic"].parameters(), strict=True):
        mean.lerp_(weight, 0.3)


CASES = {
    "gan": f"model._target_={__name__}.Gan task.step={__name__}.gan_step task.loss={__name__}.gan_loss "
    f"task.optimizers={__name__}.gan_optimizers optimizer.lr=0.01",
    "distillation": f"model._target_={__name__}.Distillation task.step={__name__}.distil_step "
    f"task.loss={__name__}.distil_loss optimizer=sgd optimizer.momentum=0 optimizer.lr=0.1 "
    "training.max_grad_norm=0.05",
    "actor": f"model._target_={__name__}.ActorCritic task.step={__name__}.actor_step task.loss={__name__}.actor_loss "
    f"task.optimizers={__name__}.actor_optimizers task.after_step={__name__}.average optimizer.lr=0.01",
}
RARE = (
    f"model._target_={__name__}.Rare task.step={__name__}.rare_step task.loss={__name__}.rare_loss optimizer.lr=0.1 "
    f"task.optimizers={__name__}.rare_optimizers training.grad_accum_steps=2 model.block_classes=[{__name__}.Block]"
)
SHARDINGS = (
    *("sharding=ddp", "sharding=per_block", "sharding=per_block sharding.api=fsdp1 training.grad_accum_steps=2"),
    *("sharding=root sharding.api=fsdp1", "sharding=per_block offload=cpu", "sharding=root"),
    *("sharding=per_layer reshard_after_forward=never", "sharding=per_block training.grad_accum_steps=2"),
    *("sharding=ddp training.grad_accum_steps=2", "sharding=per_block activation_checkpointing=full"),
)


def words(case: str, *more: str) -> list[str]:
    given = (
        f"task=custom data._target_={__name__}.Rows training.global_batch_size=16 training.epochs=2 data.num_train=64 "
        "data.num_val=64"
    )
    return " ".join([CASES[case], given, *more]).split()


def by_hand(case: str, accum: int) -> tuple[list[float], float, dict[str, float]]:
    """Return the sum of the losses of every step, the last validation loss, and the last epoch's means by name."""
    kind, step, loss, make = {
        "gan": (Gan, gan_step, gan_loss, lambda parts: gan_optimizers(parts, 0.01)),
        "distillation": (
            *(Distillation, distil_step, distil_loss),
            lambda parts: {"student": torch.optim.SGD(parts["student"].parameters(), 0.1)},
        ),
        "actor": (ActorCritic, actor_step, actor_loss, lambda parts: actor_optimizers(parts, 0.01)),
    }[case]
    torch.manual_seed(0)
    model = kind()
    parts = dict(model.named_children())
    optimizers, rows, losses = make(parts), Rows("train"), list[float]()
    for epoch in range(2):
        sums: dict[str, float] = {}
        for indices in torch.randperm(64, generator=torch.Generator().manual_seed(epoch)).split(16):
            dealt = indices.view(accum, 2, -1).transpose(0, 1)
            batches = [[default_collate([rows[int(i)] for i in some]) for some in of_rank] for of_rank in dealt]
            hand = Hand(optimizers, batches, len(losses), 0.05 if case == "distillation" else None)
            for name, value in (step(parts, hand) or {}).items():
                sums[name] = sums.get(name, 0.0) + float(value) / NUM_STEPS
            losses.append(hand.loss)
            if case == "actor":
                with torch.no_grad():
                    average(parts, len(losses))
    with torch.no_grad():
        val = loss(parts, default_collate([*Rows("val")]))
    return losses, float(val), sums


@pytest.mark.parametrize(
    ("case", "shardings"),
    [(case, SHARDINGS[:4]) for case in CASES]
    + [pytest.param(case, SHARDINGS[4:], marks=pytest.mark.ci) for case in CASES],
)
def test_a_step_is_that_of_a_loop_by_hand(case: str, shardings: Sequence[str]) -> None:
    expected = {accum: by_hand(case, accum) for accum in (1, 2)}
    trained = run_ranks(2, train_all, [words(case, sharding) for sharding in shardings])[0]
    for sharding, (losses, reported) in zip(shardings, trained, strict=True):
        by_step, val_loss, figures = expected[2 if "accum_steps=2" in sharding else 1]
        assert losses == pytest.approx(by_step, rel=1e-5, abs=1e-6), sharding
        assert reported[-1]["val/loss"] == pytest.approx(val_loss, rel=1e-5), sharding
        assert {name: reported[-1][f"train/{name}"] for name in figures} == pytest.approx(figures, rel=1e-5), sharding


def test_a_part_that_only_some_microbatches_use_and_one_in_eval_mode() -> None:
    """The teacher's dropout never drops: a step does not change the mode that the constructor set."""
    torch.manual_seed(0)
    parts, rows, expected = dict(Rare().named_children()), Rows("train"), list[float]()
    optimizers = rare_optimizers(parts, 0.1)
    for epoch in range(2):
        for indices in torch.randperm(64, generator=torch.Generator().manual_seed(epoch)).split(16):
            dealt = indices.view(2, 2, -1).transpose(0, 1)
            hand = Hand(optimizers, [[default_collate([rows[int(i)] for i in some]) for some in own] for own in dealt],
                        len(expected), None)  # fmt: skip
            rare_step(parts, hand)
            expected.append(hand.loss)
    shardings = [
        "ddp",
        "root",
        "per_block",
        "root sharding.api=fsdp1",
        "per_block sharding.api=fsdp1 training.max_grad_norm=100",
    ]
    typed = [[*words("gan", f"sharding={each}")[5:], *RARE.split()] for each in shardings]
    for sharding, (losses, _) in zip(shardings, run_ranks(2, train_all, typed)[0], strict=True):
        assert losses == pytest.approx(expected, rel=1e-5), sharding
    made = plain_loop(config(*typed[2]), parts=2)
    assert made["missing"] == "" and made["figures"][FIRST_LOSS] == pytest.approx(expected[0], rel=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_the_plain_loop_takes_the_same_step(case: str) -> None:
    made = plain_loop(config(*words(case)), parts=2)
    losses, _, _ = by_hand(case, 1)
    assert made["missing"] == ""
    assert made["draws"] is (case == "gan")
    if case != "gan":
        assert made["figures"][FIRST_LOSS] == pytest.approx(losses[0], rel=1e-6)
    trained = run_ranks(2, train_all, [words(case, "sharding=per_block")])[0][0][1][0]
    for name, value in made["figures"].items():
        if case != "gan" or name == EVAL_LOSS:
            assert trained[name] == pytest.approx(value, rel=1e-5), name


def states(sharding: str) -> Iterator[Job]:
    with tempfile.TemporaryDirectory() as folder:
        typed = words("gan", sharding, "checkpoint.mode=sync lr_schedule=cosine")
        for name, more in (("whole", []), ("cut", ["training.max_steps=5"]), ("cut", [])):
            yield Job(str(Path(folder, name)), [*typed, *more], trial=())


@pytest.mark.parametrize("sharding", ["sharding=ddp", "sharding=per_block", "sharding=per_block sharding.api=fsdp1"])
def test_a_step_resumes_with_the_state_of_each_optimizer(sharding: str) -> None:
    whole, _, resumed = run_ranks(2, train_in, [*states(sharding)])[0]
    assert resumed.losses == pytest.approx(whole.losses[-3:], rel=1e-6)
    assert resumed.epochs[-1]["train/generator"] == pytest.approx(whole.epochs[-1]["train/generator"], rel=1e-6)
    assert resumed.epochs[-1]["val/loss"] == pytest.approx(whole.epochs[-1]["val/loss"], rel=1e-6)


@pytest.mark.ci
def test_a_step_holds_what_was_forecast() -> None:
    memory = [words(case, sharding) for case in CASES for sharding in SHARDINGS[:5]]
    assert differences(memory) == []


PASTED = [
    *(
        f"gan {each}"
        for each in (
            "sharding=ddp",
            "sharding=per_block training.grad_accum_steps=2 precision=fp16 precision.init_scale=512",
        )
    ),
    "gan sharding=per_block sharding.api=fsdp1 training.grad_accum_steps=2 lr_schedule=cosine",
    *(
        f"distillation {each}"
        for each in ("sharding=per_block", "sharding=root sharding.api=fsdp1 precision=bf16_mixed")
    ),
    "distillation sharding=ddp training.grad_accum_steps=2 training.sync_each_microbatch=true",
    "distillation sharding=per_layer optimizer.decay=matrices optimizer.weight_decay=0.5",
    *(
        f"actor {each}"
        for each in ("sharding=ddp precision=bf16_mixed", "sharding=per_block lr_schedule.warmup_steps=3")
    ),
    "actor sharding=root sharding.api=fsdp1 training.max_grad_norm=0.1 precision=fp16",
]


def train_and_paste(cases: list[str]) -> list[tuple[list[float], list[float], str]]:
    """The losses of each trial on this rank's group, those of its code of plain PyTorch, and that code."""
    results = []
    for case in cases:
        typed = words(case.split()[0], *case.split()[1:], "training.epochs=1")
        memo, losses = Memo(), list[float]()
        with tempfile.TemporaryDirectory() as own:
            train(config(*typed), Path(own), memo, losses.extend)
        layout = Layout(**memo.known["layout"])
        code = to_pytorch("T", config(*typed), layout, 2, memo.known["torch"], "", (), NUM_STEPS, memo.known["calls"])
        results.append((losses, run_pasted(code, config(*typed)), code))
    return results


def run_pasted(code: str, trial: Any) -> list[float]:
    names: dict[str, Any] = {}
    exec(compile(code, "use_pytorch.py", "exec"), names)
    once, step = (textwrap.dedent(part) for part in code.split('"""')[1].split("\n\n") if part.startswith("    "))
    torch.manual_seed(0)
    names["model"], names["device"] = trial.model.function()(), torch.device("cpu")
    with mock.patch.object(dist, "init_process_group"), mock.patch.object(torch.cuda, "set_device"):
        exec(once, names)
    minimise, rows, losses = names["run"].minimize, Rows("train"), list[float]()

    def minimize(name: str, loss_of: Any) -> Tensor:
        loss: Tensor = minimise(name, loss_of)
        both = loss.clone()
        dist.all_reduce(both)
        losses[-1] += float(both) / 2
        return loss

    names["run"].minimize = minimize
    accum = trial.training.grad_accum_steps
    for number, indices in enumerate(torch.randperm(64, generator=torch.Generator().manual_seed(0)).split(16)):
        own = indices.view(accum, 2, -1)[:, dist.get_rank()]
        names["microbatches"] = [default_collate([rows[int(i)] for i in some]) for some in own]
        names["batch"] = names["microbatches"][0]
        torch.manual_seed(zlib.crc32(f"0/{number}/{dist.get_rank()}".encode()))
        losses.append(0.0)
        exec(step, names)
    return losses


@pytest.mark.ci
def test_the_pasted_step_trains_as_the_trial() -> None:
    for case, (trial, pasted, code) in zip(PASTED, run_ranks(2, train_and_paste, PASTED)[0], strict=True):
        assert pasted == pytest.approx(trial, rel=1e-5, abs=1e-6), f"{case}\n{code}"
        assert "fsdp_lab" not in code


REFUSED = {
    "task.step={0}.trains_nothing": r"task\.step=.*trains_nothing trains nothing: it must call run\.minimize",
    "task.step={0}.other_name": r"run\.minimize\('head', \.\.\.\) names no optimizer; use 'generator' or 'disc",
    "task.step={0}.returns_a_number": r"task\.step=.* returns something else; it must return \{{name: scalar tensor\}}",
    "task.step={0}.returns_a_loss": r"task\.step=.* returns the name loss, which is taken; it must return",
    "task.step={0}.uses_weights": r"task\.step=.*uses_weights uses model\.head outside model\(\.\.\.\)",
    "task.step={0}.calls_outside": r"task\.step=.*calls_outside calls the part generator outside of run\.minimize",
    "task.step={0}.fails": r"task\.step=.*fails fails: KeyError: 'critic' \(tests/.*\.py:\d+\)",
    "task.step={0}.by_rank": r"in step 1 a rank minimises 'generator', and rank 1 ends the step; every rank must",
    "task.step={0}.others": r"run\.minimize\('discriminator', \.\.\.\) gives no parameter of that optimizer a gradient",
    "task.step={0}.freezes": r"freezes uses discriminator\.parameters: run\.minimize drops all gradients of other",
    "task.step={0}.without": r"run\.minimize\('generator', \.\.\.\) is called under torch\.no_grad\(\); call",
    "task.step={0}.no_gradient": r"the loss of task\.step=.*: run\.minimize\('generator', .* is without a gradient",
    "task.optimizers={0}.of_one": r"task\.optimizers=.*of_one: discriminator\.\S+ is in 0 optimizers; give each",
    "task.optimizers={0}.of_both": r"task\.optimizers=.*of_both: generator\.\S+ is in 2 optimizers",
    "task.optimizers={0}.no_mapping": r"task\.optimizers=.*no_mapping returns a SGD; it must return \{{name",
    "task.optimizers={0}.unknown": r"task\.optimizers=.*unknown fails: KeyError: 'other'",
    "task.optimizers={0}.by_shape sharding.api=fsdp1": r"task\.optimizers=.*by_shape gives \S+ group=vectors, but",
    "model._target_={0}.NoParts": r"task\.step: NoParts has no children; its parts, as",
    "model._target_={0}.Listed": r"task\.step: the part blocks \(ModuleList\) has no forward; give it one",
    "model._target_={0}.Shared": r"task\.step: the parts generator and discriminator share the parameter blocks",
    "model._target_={0}.Beside": r"task\.step: the parameter scale is in no part of the model; move it into a child",
}


def fails_alone(parts: Mapping[str, Any]) -> None:
    pass


def trains_nothing(parts: Mapping[str, Any], run: Any) -> None:
    pass


def other_name(parts: Mapping[str, Any], run: Any) -> None:
    run.minimize("head", lambda batch: gan_loss(parts, batch))


def returns_a_number(parts: Mapping[str, Any], run: Any) -> float:
    return float(run.minimize("generator", lambda batch: gan_loss(parts, batch)))


def returns_a_loss(parts: Mapping[str, Any], run: Any) -> dict[str, Tensor]:
    return {"loss": run.minimize("generator", lambda batch: gan_loss(parts, batch))}


def uses_weights(parts: Mapping[str, Any], run: Any) -> None:
    run.minimize("generator", lambda batch: parts["generator"].head(batch[0]).mean())


def calls_outside(parts: Mapping[str, Any], run: Any) -> None:
    parts["generator"](torch.zeros(1, 8))


def by_rank(parts: Mapping[str, Any], run: Any) -> None:
    run.minimize("discriminator", lambda batch: real(parts["discriminator"](batch[0]), 1))
    if dist.get_rank() == 0:
        run.minimize("generator", lambda batch: gan_loss(parts, batch))


def others(parts: Mapping[str, Any], run: Any) -> None:
    run.minimize("discriminator", lambda batch: parts["generator"](batch[0]).mean())


def freezes(parts: Mapping[str, Any], run: Any) -> None:
    for parameter in parts["discriminator"].parameters():
        parameter.requires_grad_(False)


def without(parts: Mapping[str, Any], run: Any) -> None:
    with torch.no_grad():
        run.minimize("generator", lambda batch: gan_loss(parts, batch))


def fails(parts: Mapping[str, Any], run: Any) -> None:
    parts["critic"]


def no_gradient(parts: Mapping[str, Any], run: Any) -> None:
    run.minimize("generator", lambda batch: gan_loss(parts, batch).detach())


def of_one(parts: Mapping[str, nn.Module], lr: float) -> dict[str, torch.optim.Optimizer]:
    return {"generator": torch.optim.SGD(parts["generator"].parameters(), 0.1)}


def of_both(parts: Mapping[str, nn.Module], lr: float) -> dict[str, torch.optim.Optimizer]:
    return {**of_one(parts, lr), "all": torch.optim.SGD([p for part in parts.values() for p in part.parameters()], 0.1)}


def no_mapping(parts: Mapping[str, nn.Module], lr: float) -> Any:
    return torch.optim.SGD(parts["generator"].parameters(), 0.1)


def unknown(parts: Mapping[str, nn.Module], lr: float) -> Any:
    return parts["other"]


def by_shape(parts: Mapping[str, nn.Module], lr: float) -> dict[str, torch.optim.Optimizer]:
    every = [p for part in parts.values() for p in part.parameters()]
    return {
        "matrices": torch.optim.SGD([p for p in every if p.ndim > 1] or [torch.zeros(1, requires_grad=True)], 0.1),
        "vectors": torch.optim.SGD([p for p in every if p.ndim < 2], 0.1),
    }


class NoParts(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(8, 8)])


class Shared(Gan):
    def __init__(self) -> None:
        super().__init__()
        self.generator.blocks[0].weight = self.discriminator.blocks[0].weight


class Beside(Gan):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))


def test_what_a_step_does_wrong_is_refused() -> None:
    typed = [words("gan", "sharding=per_block", *case.format(__name__).split()) for case in REFUSED]
    for (case, expected), found in zip(REFUSED.items(), run_ranks(2, outcomes, typed)[0], strict=True):
        assert isinstance(found, str) and re.search(expected.replace("{{", "{").replace("}}", "}"), found), (
            case,
            found,
        )


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("task.step=null", "task.optimizers=.* without task.step: set task.step, too, or "),
        ("task=model_loss task.loss=null", "task.step=.* with task=model_loss: use task=custom"),
        (f"task.step={__name__}.fails_alone", "is called as fails_alone\\(parts, run\\); give it these two parameters"),
        ("optimizer=custom optimizer._target_=torch.optim.SGD", "optimizer._target_ with task.optimizers="),
        (
            "optimizer.weight_decay=0.1",
            "optimizer.weight_decay with task.optimizers=.*, which gets the parts and optimizer.lr",
        ),
        (f"task.optimizers={__name__}.fails_alone", "is called as fails_alone\\(parts, lr\\)"),
        ("sharding=per_block sharding.embeddings=own", "sharding.embeddings=own with task.step"),
    ],
)
def test_keys_that_do_not_go_with_a_step(more: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        check_trial(config(*words("gan", more)), 2)


@pytest.mark.ci
@pytest.mark.documents("python -m fsdp_lab -m model._target_=my_project.gan.Gan...")
def test_the_gan_of_the_page_trains(tmp_path: Path) -> None:
    page = (ROOT / "docs/recipes.md").read_text()
    code, after = page.partition("```python\n# my_project/gan.py\n")[2].split("```\n", 1)
    assert len([line for line in code.splitlines() if line.strip()]) <= 25
    command = after.partition("python -m ")[2].partition("```")[0].replace("\\\n", " ")
    shown = after.partition("```text\n...\n")[2].partition("\n...")[0].splitlines()
    (tmp_path / "my_project").mkdir()
    (tmp_path / "my_project/gan.py").write_text(code)
    lay_store(tmp_path)
    done = forked.run(tmp_path, *command.split(), *HERE, seconds=300, environment={**os.environ, "COLUMNS": "200"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(line.partition(" (")[0] in done.stdout for line in shown), done.stdout
