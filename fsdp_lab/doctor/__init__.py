"""`python -m fsdp_lab.doctor`: whether this machine can run sweeps. Runs without any library; MLflow asks a server.

`__main__.py` lists the checks. They are in `machine.py`, `libraries.py` and `services.py`.
"""
