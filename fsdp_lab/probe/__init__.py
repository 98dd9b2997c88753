"""A minute of measuring: what this machine's device, host and links do, as the figures of a device file.

`cases.py` and `collectives.py` say what is timed, `timer.py` times it, `figures.py` makes a `Device` of it.
"""
