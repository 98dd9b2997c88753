"""Training one trial in plain PyTorch, under torchrun or any launcher that makes a process group.

Imports neither Ray nor Hydra nor MLflow. `train` is the whole flow; start reading there.
"""

from fsdp_lab.training.divergence import DivergedError
from fsdp_lab.training.train import Reporter, train

__all__ = ["DivergedError", "Reporter", "train"]
