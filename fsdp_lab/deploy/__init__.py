"""Commands of fsdp_lab as jobs of a cluster manager: `job.py` describes a command line, each manager has one module.

`launch.py` chooses the manager. Knows nothing of sweeps: `sweep/submit.py` and `nightly/__main__.py` say what to run.
"""
