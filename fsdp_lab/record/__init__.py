"""The folder of a sweep and of a trial, typed: the only code that opens its files. Imports `config` and `storage`.

Start with `SweepRecord` in `sweep.py`: all code that shows or judges results reads it.
"""
