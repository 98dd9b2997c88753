"""What a constructor makes is what is trained: its weights and buffers, attributes, references and hooks; or it is
refused by name. Plain loops that import nothing of the package say what is right."""

from __future__ import annotations

from functools import cache, partial
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import default_collate

from fsdp_lab.training import distributed, weights
from fsdp_lab.training.parallel import build_parallel
from fsdp_lab.workloads.build import build_workload
from tests.parity import SHARDINGS, WORKLOADS
from tests.ranks import Memo, config, outcomes, run_ranks
from tests.training.reference import first_weights

HERE = __name__
DDP, BLOCK, LAYER = "sharding=ddp", "sharding=per_block", "sharding=per_layer"
FSDP1 = "sharding=root sharding.api=fsdp1"
INITS = ("plain", "rank0")


class Rows:
    def __init__(self, split: str) -> None:
        generator = torch.Generator().manual_seed(len(split))
        self.x = torch.randn(64, 8, generator=generator)
        self.y = self.x.sum(1, keepdim=True).tanh()

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i], self.y[i]


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


class Anchored(Net):
    """A weight and a buffer with the same first values, drawn without a seed of the constructor's own."""

    def __init__(self) -> None:
        super().__init__()
        start = torch.randn(1, 8)
        self.scale = nn.Parameter(start.clone())
        self.register_buffer("start", start)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 3 * (self.scale - self.start))


class Marked(Net):
    """Biases are not to decay."""

    def __init__(self) -> None:
        super().__init__()
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.ones_(parameter)
                parameter._no_weight_decay = True


class Decays(torch.optim.SGD):
    """Decays what is not marked."""

    def __init__(self, params: Any, lr: float) -> None:
        params = list(params)
        kept = [p for p in params if getattr(p, "_no_weight_decay", False)]
        rest = [p for p in params if not getattr(p, "_no_weight_decay", False)]
        super().__init__([{"params": kept}, {"params": rest, "weight_decay": 0.5}], lr=lr)


class Shaped(Marked):
    """Matrices decay, the last one twice as fast."""


class DecaysMatrices(torch.optim.SGD):
    """Decays what has two dimensions, and more what is narrow."""

    def __init__(self, params: Any, lr: float) -> None:
        groups = [{"params": p, "weight_decay": 0.25 + 0.25 * (len(p) == 1) if p.ndim >= 2 else 0.0} for p in params]
        super().__init__(groups, lr=lr)


class Clamps(Net):
    """It holds a weight in a list, and writes it through that."""

    def __init__(self) -> None:
        super().__init__()
        self.clipped = [self.head.weight]

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for weight in self.clipped:
                weight.clamp_(-0.01, 0.01)
        return super().forward(x)


class Penalised(Net):
    """It holds weights in an object of its own, and adds a penalty of them."""

    def __init__(self) -> None:
        super().__init__()
        held = [*self.blocks.parameters()]
        self.penalty = lambda: sum(w.pow(2).sum() for w in held)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.penalty()


class Masked(Net):
    """Half of a gradient is masked."""

    def __init__(self) -> None:
        super().__init__()
        mask = torch.arange(8.0).remainder(2)
        self.head.weight.register_hook(lambda gradient: gradient * mask)


class Bare(Net):
    """Weights of its own, that no method initialises."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale)


class Forgets(Bare):
    def reset_parameters(self) -> None:
        """Leave the scale as it is."""


OPTIMIZERS: dict[type[nn.Module], Any] = {Marked: Decays, Shaped: DecaysMatrices}


def words(model: type[nn.Module], *more: str) -> list[str]:
    typed = [f"model._target_={HERE}.{model.__name__}", f"data._target_={HERE}.Rows", f"task.loss={HERE}.loss"]
    own = OPTIMIZERS.get(model)
    optimizer = (f"optimizer._target_={HERE}.{own.__name__}",) if own else ("optimizer=sgd", "optimizer.momentum=0")
    return [*typed, *optimizer, "optimizer.lr=0.02", "data.num_train=64", "training.global_batch_size=16", *more]


@cache
def plain(kind: type[nn.Module]) -> list[float]:
    """The losses of a script that a user would write."""
    torch.manual_seed(0)
    model, rows, losses = kind(), Rows("train"), []
    optimizer = OPTIMIZERS.get(kind, torch.optim.SGD)(model.parameters(), lr=0.02)
    for indices in torch.randperm(64, generator=torch.Generator().manual_seed(0)).split(16):
        value = loss(model, default_collate([rows[i] for i in indices.tolist()]))
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


EVERYWHERE = (Anchored, Marked)
# What sharding replaces -> how it is refused.
BY_DDP_ONLY = {
    Clamps: "the model's clipped holds the parameter head.weight, but FSDP",
    Penalised: "the model's penalty holds the parameter blocks.",
    Masked: "the parameter head.weight has a hook",
}
FLAT = "optimizer._target_=tests.training.test_constructor.DecaysMatrices gives blocks.0.weight weight_decay=0.0, but "


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.ci)])
def test_what_a_constructor_made_is_trained_or_refused(ranks: int) -> None:
    shardings = (DDP, BLOCK, LAYER, FSDP1)
    cases = [(kind, *sharding.split()) for kind in (*EVERYWHERE, Shaped, *BY_DDP_ONLY) for sharding in shardings]
    cases += [(kind, BLOCK, "init=rank0") for kind in EVERYWHERE] + [(Clamps, DDP, "init=rank0")]
    got = run_ranks(ranks, outcomes, [words(kind, *more) for kind, *more in cases])
    for (kind, *more), found, other in zip(cases, got[0], got[1], strict=True):
        assert found == other, "ranks end alike"
        if kind is Shaped and more == FSDP1.split():
            assert FLAT in found and "but weight_decay=0.25 where" in found and "use sharding.api=fsdp2" in found, found
        elif kind in (*EVERYWHERE, Shaped) or more[0] == DDP:
            assert found == pytest.approx(plain(kind), rel=1e-6), (kind, more)
        else:
            assert BY_DDP_ONLY[kind] in found and "or use sharding=ddp" in found, found


class NeedsValues(torch.optim.SGD):
    """Looks at values, so it cannot be called with parameters without."""

    def __init__(self, params: Any, lr: float) -> None:
        params = list(params)
        assert all(p.detach().numpy().size >= 0 for p in params)
        super().__init__(params, lr=lr)


def notes_of(cases: list[list[str]]) -> list[str]:
    """The notes of each case."""
    from fsdp_lab.training.train import train

    notes = []
    for overrides in cases:
        memo = Memo()
        with TemporaryDirectory() as folder:
            train(config(*overrides), Path(folder), memo, lambda losses: None)
        notes.append(" ".join(memo.known["notes"]))
    return notes


def test_flat_parts_are_noted_where_groups_were_not_compared() -> None:
    """With FSDP1, that is."""
    made = words(Marked, *FSDP1.split(), "training.max_steps=1")
    compared, other = run_ranks(2, notes_of, [made, [*made, f"optimizer._target_={HERE}.NeedsValues"]])[0]
    assert "flat parts" not in compared and "flat parts" in other


def test_a_plain_loop_learns_something_else_without_what_was_lost() -> None:
    """So the test above notices: a mask, a clamp, a decay, a buffer of another draw."""
    assert len({tuple(plain(kind)) for kind in (Net, *EVERYWHERE, Shaped, *BY_DDP_ONLY)}) == 7


def initial_weights(cases: list[list[str]]) -> list[dict[str, Tensor]]:
    """Return the whole first weights of each case."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    from fsdp_lab.training.build import build

    ranks, whole = distributed.setup_distributed(), StateDictOptions(full_state_dict=True, cpu_offload=True)
    results = []
    for case in cases:
        trial = config(*case)
        parallel, workload = build_parallel(trial, ranks), build_workload(trial.model, trial.data, trial.task)
        first = weights.build_model(workload.model, trial)

        state = build(workload, first.model, parallel, partial(weights.fill, first=first, parallel=parallel))
        results.append(dict(get_model_state_dict(state.model, options=whole)) | {"": first})
    return [{k: (v.init, v.notes) if k == "" else v for k, v in result.items()} for result in results]


def test_every_sharding_and_init_starts_from_the_same_bits() -> None:
    """Each sharding with one `init` in turn, then each `init` with recomputed blocks and offloaded parameters."""
    pairs = zip(SHARDINGS, cycle(INITS), strict=False)
    cases = [[*SHARDINGS[sharding], f"init={init}", "model.num_layers=2"] for sharding, init in pairs]
    more = ("training.seed=7", "activation_checkpointing=full", "offload=cpu", *WORKLOADS["mlp"].words)
    cases += [["sharding=per_block", f"init={init}", *more] for init in INITS]
    cases += [[*words(Anchored, sharding), "init=rank0"] for sharding in (DDP, LAYER)]
    for case, got in zip(cases, run_ranks(2, initial_weights, cases)[0], strict=True):
        assert got.pop("") == (next(i for i in weights.Init if f"init={i.name}" in case), [])
        expected = first_weights(config(*case))
        assert got.keys() == expected.keys(), case
        assert all(torch.equal(got[key], expected[key]) for key in expected), case


def on_full_hosts(cases: list[list[str]]) -> list[dict[str, Tensor]]:
    weights.free_memory = lambda: 10_000  # bytes, of which two ranks may take 2,500 each
    return initial_weights(cases)


def test_a_model_that_hosts_cannot_hold_twice_is_sent() -> None:
    """By one rank's constructor, and the trial says so; a smaller one is built by every rank."""
    (small, large), other = run_ranks(2, on_full_hosts, [words(Net, LAYER), ["model=mlp", LAYER]])
    assert small[""] == (weights.Init.plain, [])
    init, (note,) = large.pop("")
    assert init is weights.Init.rank0 and other[1][""] == (init, [note])
    assert "init=plain needs more than half of a node's free memory" in note and "for 2 ranks" in note
    expected = first_weights(config("model=mlp"))
    assert all(torch.equal(large[key], expected[key]) for key in expected)


def test_with_init_meta_modules_draw_their_own_shards() -> None:
    """Every part another one, replicas alike, and as far spread as the constructor's."""
    sizes = ["model=mlp", "model.image_size=16", "model.hidden_dim=64", "init=meta"]
    llama = ["model=lm_tiny", "data=pydoc", "task=language", BLOCK, "init=meta"]
    cases = [
        [*sizes, LAYER],
        [*sizes, LAYER, "sharding.dp_replicate=2"],
        [*sizes, DDP],
        [*sizes, *FSDP1.split()],
        llama,
    ]
    for case, got in zip(cases, run_ranks(4, initial_weights, cases)[0], strict=True):
        assert got.pop("") == (weights.Init.meta, [])
        plainly = first_weights(config(*case))
        for name, value in got.items():
            drawn = value.numel() > 500 and plainly[name].std() > 0
            assert not drawn or float(value.std() / plainly[name].std()) == pytest.approx(1, abs=0.15), (case, name)
            halves = value.chunk(2) if value.ndim > 1 and drawn else (torch.zeros(1), torch.ones(1))
            assert not torch.equal(*halves), (case, name)


def test_with_init_meta_what_nobody_initialises_is_refused() -> None:
    cases = [words(kind, BLOCK, "init=meta") for kind in (Bare, Forgets, Masked, Net)]
    cases.append(["model=lm_tiny", "data=pydoc", "task=language", "sharding=root", "sharding.tp=2", "init=meta"])
    bare, forgets, masked, net, divided = run_ranks(2, outcomes, cases)[0]
    assert "init=meta: the model (Bare) has the weights scale, but no method reset_parameters()" in bare
    assert "init=meta: scale has no value after reset_parameters()" in forgets
    assert "has a hook" in masked and len(net) == 4
    assert "init=meta with sharding.tp=2: on a CPU" in divided
