"""What this machine's operators, collectives and Python take, measured in about two minutes: a device file."""
