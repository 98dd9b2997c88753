"""The time of a step on a device that need not be present: its operators, and the cost of each. Imports no torch.

Start with `predict.py`. `program.py` holds the operators, `device.py` the data sheet, `costs.py` the seconds of an
operator, `streams.py` the order on the device's streams.
"""
