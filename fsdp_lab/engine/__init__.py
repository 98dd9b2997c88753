"""One trial as a Ray Train job: cluster, workers, failures. Ray is imported inside the calls.

Start with `job.py`, which runs in Tune's process, `worker.py`, which Ray's workers run, and `rank.py`, which trains.
`cluster.py` starts Ray or connects to it. `outcome.py` tells why ranks failed and what is tried again. `shortcut.py`
has every private name of Ray; trials run without it, too.
"""
