"""The memory and speed of a trial before it runs. Imports `training`, whose code it runs on fake tensors.

Start with `forecast.py`, one trial: `fake.py` replaces tensors and peers, `training/recorder.py` records the step, whose
peak is in `training/profile.py`, `capacity.py` adds what a GPU holds besides. `speed/` prices the operators of `trace.py`.
"""
