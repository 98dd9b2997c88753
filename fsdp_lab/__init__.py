"""fsdp_lab: sweep FSDP2 settings, compare memory, speed and loss."""

__version__ = "0.1.0"
