"""The parts of a training: a model, a data set and a task, composed into one `Workload`.

A workload knows nothing of sharding, precision, devices or ranks. `base.py` is the contract, `build.py` composes the
workload that a config names. Nothing is imported here: commands check the arguments of a data set without PyTorch.
"""
