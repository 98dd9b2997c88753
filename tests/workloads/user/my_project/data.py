"""A user's data sets: map-style, plain PyTorch."""

import random

import numpy as np
import torch


class Corpus:
    """Three numbers and their sum."""

    def __init__(self, split, noise=0.0):
        generator = torch.Generator().manual_seed(0 if split == "train" else 1)
        self.x = torch.randn(128 if split == "train" else 31, 3, generator=generator)
        self.noise = noise

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i], "y": self.x[i].sum() + self.noise}


class Sparse(Corpus):
    """Its numbers are sparse."""

    def __getitem__(self, i):
        return {**super().__getitem__(i), "x": self.x[i].to_sparse()}


class AtOnce(Corpus):
    """Whole batches, as of a database; one item cannot be read."""

    __getitem__ = None

    def __getitems__(self, indices):
        return [{"x": self.x[i], "y": self.x[i].sum()} for i in indices]


class Stream(torch.utils.data.IterableDataset):
    """A stream that has a length."""

    def __init__(self, split):
        self.count = 64

    def __len__(self):
        return self.count

    def __iter__(self):
        yield from ({"x": torch.ones(3), "y": torch.ones(())} for _ in range(self.count))


class Augmented(Corpus):
    """Numbers with noise of all three generators; which of them there are is drawn, too."""

    def __init__(self, split):
        super().__init__(split)
        self.x = self.x[np.random.permutation(len(self.x))]

    def __getitem__(self, i):
        noise = random.random() + np.random.rand() + torch.rand(()).item()
        return {"x": self.x[i], "y": self.x[i].sum() + noise}


class Pictures:
    """Dark and bright pictures, told apart by their label."""

    def __init__(self, split):
        self.count = 64 if split == "train" else 11

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return torch.full((1, 28, 28), i % 2 - 0.5), i % 2


def collate_wrongly(items):
    return {"x": torch.stack([item["x"][:2] for item in items]), "y": torch.stack([item["y"] for item in items])}


def stream(split):
    return (i for i in range(3))


def empty(split):
    return []


class Unreadable(Corpus):
    """Most items cannot be read."""

    def __getitem__(self, i):
        if 4 <= i < len(self) - 4:
            raise ValueError(f"item {i} is broken")
        return super().__getitem__(i)


class Ragged(Corpus):
    """Items of different sizes."""

    def __getitem__(self, i):
        return {"x": self.x[i, : 2 + i % 2], "y": self.x[i].sum()}
