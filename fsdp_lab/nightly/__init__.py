"""A study that runs every night: one night, the gate, the documents of the nights. Imports `sweep` and `report`.

Start with `run.py`, one night from start to finish. `gate.py` decides what got worse, `nights.py` keeps a document of
each night, `schedule.py` starts them, and `texts.py` makes all text that a verdict shows.
"""
