"""The parts of a training: a model, a data set and a task, composed into one `Workload`.

A workload knows nothing of sharding, precision, devices or ranks. `base.py` is the contract, `build.py` composes the
workload that a config names. A model or a data set is one file and one line of `fsdp_lab/config/registry.py`.
"""

from fsdp_lab.workloads.base import Batch, Data, DataSpec, ModelSpec, Task, Workload
from fsdp_lab.workloads.build import build_workload

__all__ = ["Batch", "Data", "DataSpec", "ModelSpec", "Task", "Workload", "build_workload"]
