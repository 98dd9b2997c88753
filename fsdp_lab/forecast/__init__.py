"""The memory and speed of a trial before it runs. Runs the code of `training` on fake tensors.

Start with `forecast.py`, one trial: `fake.py` replaces tensors and peers, `memory/recorder.py` records the step,
`memory/profile.py` has its peak, `capacity.py` adds what a GPU holds in addition. `trace.py` records the operators that
`speed/` prices.
"""
