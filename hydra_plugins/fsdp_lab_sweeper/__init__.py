"""The Hydra plugin that runs fsdp_lab's sweeps."""
