"""Sweeps: from overrides to trials, and the trials through Ray Tune. Imports every room up to `tracking`.

`start.py` takes a command to its exit status: `command.py` plans (`grid.py`, `plan.py`, `search.py`), `runner.py` runs.
Start with `start.py` and `sweep.py`. `executors/` run trials, `outputs/` show them, `store/` keeps them on disk.
"""
