"""The tasks that are known by name: what a model learns from a batch, one file each."""
