"""A trial's setting as a script of plain PyTorch.

Text from plain values: imports neither the model nor PyTorch.
"""

from fsdp_lab.takehome.pytorch import SCRIPT, to_pytorch
from fsdp_lab.takehome.setup import Setup, read_setup

__all__ = ["SCRIPT", "Setup", "read_setup", "to_pytorch"]
