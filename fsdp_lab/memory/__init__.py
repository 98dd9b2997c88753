"""The memory of a step by category and module, for real and for fake tensors.

Start with `recorder.py`, which records a step, and `profile.py`, the result. `torch_private.py` has PyTorch's
private names, for training too.
"""
