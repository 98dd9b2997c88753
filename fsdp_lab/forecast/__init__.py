"""The memory and speed of a trial before it runs. Imports `training`, whose code it runs on fake tensors.

Start with `forecast.py`, one trial: `fake.py` replaces tensors and peers, `memory/recorder.py` records the step,
`memory/profile.py` has its peak, `capacity.py` adds what a GPU holds besides. `trace.py` records the operators that
`speed/` prices.
"""
