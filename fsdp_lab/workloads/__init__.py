"""The parts of a training: a model, a data set and a task, composed into one `Workload`. Imports `config`, `storage`.

A workload knows nothing of sharding, precision, devices or ranks. Start with `base.py`, the contract, and `build.py`,
which composes. Nothing is imported here, so that commands check the arguments of a data set without PyTorch.
"""
