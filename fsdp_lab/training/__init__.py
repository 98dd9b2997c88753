"""Training one trial in plain PyTorch, under torchrun or any launcher that makes a process group.

Imports neither Ray nor Hydra nor MLflow, and nothing here: reports read layouts without PyTorch.
Start with `train.py`, the whole flow.
"""
