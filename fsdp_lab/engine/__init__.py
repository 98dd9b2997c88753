"""One trial as a Ray Train job: cluster, workers, failures. Imports Ray inside the calls that need it.

Start with `job.py`, which runs in Tune's process, `worker.py`, which Ray's workers run, and `rank.py`, which trains.
`cluster.py` starts Ray or connects to it. `shortcut.py` has every private name of Ray; trials also run without it.
"""
