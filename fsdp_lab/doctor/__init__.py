"""`python -m fsdp_lab.doctor`: whether this machine can run sweeps. Imports nothing outside the standard library.

`__main__.py` lists the checks. They are in `machine.py`, `libraries.py` and `services.py`.
"""
