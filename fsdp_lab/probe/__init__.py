"""Measures this machine's device, host and links in a minute, as the figures of a device file.

`cases.py` and `collectives.py` define what to time, `timer.py` times it, `figures.py` makes a `Device` from it.
"""
