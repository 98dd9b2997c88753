"""This machine: GPUs, cores, memory, what else uses them, and the versions of libraries. Imports no other room.

Start with `hardware.py`.
"""
