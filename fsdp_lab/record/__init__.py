"""The folder of a sweep and of a trial, typed: the only code that opens its files."""
