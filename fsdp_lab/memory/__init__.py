"""What a step holds, by category and module, of real tensors and of fake ones. Needs only PyTorch.

Start with `recorder.py`, which follows a step, and `profile.py`, what it has seen.
"""
