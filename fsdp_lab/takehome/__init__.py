"""A trial's setting as files for other programs: a plain PyTorch script, accelerate's YAML, torchtitan's TOML.

Text from plain values: imports neither the model nor PyTorch.
"""

from fsdp_lab.takehome.setup import Setup, read_setup
from fsdp_lab.takehome.write import FILES, write_out

__all__ = ["FILES", "Setup", "read_setup", "write_out"]
