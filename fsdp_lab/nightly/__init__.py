"""A study that runs every night: the schedule, one night, the gate, and the page of the last thirty."""
