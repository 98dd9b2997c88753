"""The samplers of `search=...`, one file each: where Optuna takes its suggestions from."""
