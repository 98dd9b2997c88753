"""The memory of a trial before it runs: fake tensors, a fake process group, the training code itself."""
