"""The command line: entry points, help, messages. No other package imports it.

Each `__main__.py` calls one module here. Start with `main.py`, the command line of trials and sweeps.
"""
