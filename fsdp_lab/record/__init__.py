"""The folder of a sweep and of a trial, typed: the only code that opens its files. Imports `config` and `storage`.

Start with `sweep.py`, `SweepRecord`, which everything reads that shows or judges results.
"""
