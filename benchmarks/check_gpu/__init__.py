"""Checks on a real GPU what the tests can only check on a CPU: `python -m benchmarks.check_gpu`.

Start reading at `__main__.py`. `lines.py` has the vocabulary, `subjects.py` lists what is checked, in order of
importance. Needs torch and torchvision only.
"""
