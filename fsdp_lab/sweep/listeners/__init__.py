"""What publishes a sweep: MLflow runs, `results.csv`, the report, the terminal; and what forecasts its trials."""
