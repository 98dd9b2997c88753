"""The memory and speed of a trial before it runs: fake tensors, a fake process group, the training code itself.

Start with `forecast.py`, one trial. `fake.py` replaces tensors and peers, `trace.py` records operators for speed,
`allocator.py` and `kernels.py` account for a GPU. `run.py` forecasts many trials in the processes of `pool.py`.
"""
