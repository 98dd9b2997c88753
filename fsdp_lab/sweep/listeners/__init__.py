"""Listeners that publish a sweep: MLflow runs, `results.csv`, the report, the terminal; and its forecasts."""
