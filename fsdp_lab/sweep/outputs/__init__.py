"""Outputs of a sweep: the terminal, `results.csv`, MLflow runs and the report. Start with `outputs.py`."""
