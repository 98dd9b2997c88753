"""What a step holds, by category and module, of real tensors and of fake ones.

Start with `recorder.py`, which follows a step, and `profile.py`, what it has seen. `torch_private.py` has PyTorch's
private names, for training too.
"""
