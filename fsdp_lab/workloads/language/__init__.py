"""Language models: plain PyTorch models, data sets of tokens, and the task, one file each."""
