"""What people type and read: entry points, help, messages. Imports every room; nothing imports it.

Each `__main__.py` calls one module here. Start with `main.py`, the command line of trials and sweeps.
"""
