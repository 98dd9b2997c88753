"""The schedulers of `scheduler=...`, one file each: which trials Ray Tune stops early."""
