"""A user's model and losses: plain PyTorch."""

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.tanh(self.layer(x))


class Net(nn.Module):
    tolerance = 0.0

    def __init__(self, width, depth=2):
        super().__init__()
        self.first = nn.Linear(3, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return {"sum": self.head(x).squeeze(-1)}

    def example_batch(self, size):
        return {"x": torch.ones(size, 3), "y": torch.full((size,), 3.0)}


def loss(model, batch):
    return of_each_item(model, batch).mean()


def of_each_item(model, batch):
    return (model(batch["x"])["sum"] - batch["y"]) ** 2


def loss_of_other_keys(model, batch):
    return F.mse_loss(model(batch["x"])["sum"], batch["labels"])


def loss_with_penalty(model, batch):
    return loss(model, batch) + 0.01 * model.head.weight.pow(2).mean()


def loss_as_a_number(model, batch):
    return loss(model, batch).item()


def off_by(model, batch):
    wrong = (model(batch["x"])["sum"] - batch["y"]).abs() - model.tolerance  # a plain value may be read
    return {"off_by": (wrong.sum(), torch.tensor(len(wrong)))}


def labels(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


def digits(width):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 10))


class WithLoss(Net):
    """As the models of transformers: it computes its loss when it is given the labels."""

    def forward(self, x, y=None):
        sums = super().forward(x)["sum"]
        return {"sum": sums} if y is None else {"loss": F.mse_loss(sums, y), "sum": sums}


class Reads(Net):
    """Its constructor wants the values of a parameter."""

    def __init__(self, width):
        super().__init__(width)
        self.scale = 1 / self.head.weight.norm().item()

    def forward(self, x):
        return {"sum": self.scale * super().forward(x)["sum"]}


class Asks(Net):
    """What it computes hangs on a value."""

    def forward(self, x):
        return super().forward(x if x.sum().item() < 1e9 else 2 * x)


class OnlyHead(Net):
    """Trains its head alone."""

    def __init__(self, width):
        super().__init__(width)
        self.requires_grad_(False)
        self.head.requires_grad_(True)


class Refuses(Net):
    def forward(self, x):
        raise ValueError("these are too many")


class Wraps(nn.Module):
    """It is given its modules."""

    def __init__(self, inner, others=()):
        super().__init__()
        self.inner, self.others = inner, nn.ModuleList(others)

    def forward(self, x):
        for other in self.others:
            x = other(x)
        return self.inner(x)


class Reader(nn.Module):
    """Tells each token from the one before."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 8)
        self.head = nn.Linear(8, 7)

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


class LeavesOut(Net):
    """It leaves layers out, but never of a batch of two items, which is what is looked at before."""

    def forward(self, x):
        if len(x) > 2:
            x = torch.cat([x, x.new_ones(len(x), self.head.in_features - 3)], 1)
            return {"sum": self.head(x).squeeze(-1)}
        return super().forward(x)


class Fails(Net):
    """Its forward pass raises what no shape explains."""

    def forward(self, x):
        raise RuntimeError("boom")
