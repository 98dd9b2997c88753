"""A study that runs every night: one night, the gate, the documents of the nights.

Start with `night.py`, one night from start to finish. `gate.py` has the record of a night and decides what got worse.
`texts.py` makes the text of a verdict. `commands/nightly.py` reads the study and starts nights on time.
"""
