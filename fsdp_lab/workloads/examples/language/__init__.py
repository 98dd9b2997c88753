"""Language models: plain PyTorch models, and data sets of tokens, one file each."""
