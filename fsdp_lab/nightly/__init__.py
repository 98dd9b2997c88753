"""A study that runs every night: the schedule, one night, the gate, and the page of the last thirty.

Start with `night.py`, one night from begin to end. `loop.py` decides which nights are due, `gate.py` what got worse.
`nights.py` lists the files of a night, `shared.py` its objects in storage.
"""
