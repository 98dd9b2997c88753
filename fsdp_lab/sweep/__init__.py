"""Sweeps: from overrides to trials, and the trials through Ray Tune. Imports every room up to `tracking`.

`multirun.py` is Hydra's `-m`: it plans the sweep (`grid.py`, `plan.py`, `search.py`) and runs it (`runner.py`).
Start with `runner.py` and `state.py`. `executors/` run trials, `listeners/` publish them, `store/` keeps them on disk.
"""
