"""The memory and speed of a trial before it runs. Imports `training`, whose code it runs on fake tensors.

Start with `forecast.py`, one trial. `fake.py` replaces tensors and peers, `trace.py` records operators, `allocator.py`
accounts for a GPU, `speed/` prices the operators. `run.py` forecasts many trials in the processes of `pool.py`.
"""
