"""The user's model, data set and loss as the parts of a workload: plain PyTorch that does not import fsdp_lab."""
