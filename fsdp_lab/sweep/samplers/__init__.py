"""The samplers of `search=...`, one file each: where Optuna takes its suggestions from."""

# The attribute of a trial of Optuna's that says by what share it exceeded the memory of a device; 0 and below: it fits.
OVERRUN = "overrun"
