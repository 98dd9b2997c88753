"""The time that this machine's operators, collectives and Python take, measured in about two minutes: a device file.

`rank.py` measures the training steps of `reference.py` on each rank. `steps.py` forecasts the same steps, `fit.py` fits
one to the other, and `sure.py` decides whether the result replaces an earlier one.
"""
