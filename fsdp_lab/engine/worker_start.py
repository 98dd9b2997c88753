"""What each process of a Ray that was started here imports first, before it asks for work."""

from fsdp_lab import quick_imports

quick_imports.begin()
