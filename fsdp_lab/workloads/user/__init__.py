"""The user's model, data set and loss, as the parts of a workload: plain PyTorch that knows nothing of fsdp_lab."""
