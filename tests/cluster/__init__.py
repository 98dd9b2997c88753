"""Sweeps over several nodes: network namespaces of this machine, with a raylet in each."""
