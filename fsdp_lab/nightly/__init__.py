"""A study that runs every night: one night, the gate, the documents of the nights. Imports `sweep` and `report`.

Start with `night.py`, one night from start to finish. `gate.py` has the record of a night and decides what got worse,
and `texts.py` makes all text that a verdict shows. `commands/nightly.py` reads the study and starts nights on time.
"""
