"""A trial's setting as the files of other programs: a plain PyTorch script, accelerate's YAML, torchtitan's TOML.

Text from plain values: nothing of a model or of PyTorch is imported here.
"""

from fsdp_lab.takehome.setup import Setup, read_setup
from fsdp_lab.takehome.write import FILES, write_out

__all__ = ["FILES", "Setup", "read_setup", "write_out"]
