"""Runs -> tables, plots and the recommended setting. Sees `config` only, and never trains."""
