"""Sweeps: from overrides to trials, and the trials through Ray Tune. Imports every room up to `tracking`.

`start.py` runs a command: `command.py` plans (`grid.py`, `plan.py`, `search.py`), `runner.py` runs the trials.
Start with `start.py` and `sweep.py`. `tuner.py` gives trials to Ray Tune, `outputs/` show them, `store/` keeps them on
disk, and `record.py` makes the record that the report reads.
"""
