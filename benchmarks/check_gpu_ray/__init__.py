"""Real sweeps on a machine with GPUs, and the wheels that such a machine needs when it has no network."""
