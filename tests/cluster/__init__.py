"""Sweeps over several nodes, as network namespaces of this machine with a raylet in each, and in object storage."""
