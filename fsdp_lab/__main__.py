"""`python -m fsdp_lab`: a trial, or with -m a sweep."""

from __future__ import annotations

from fsdp_lab.commands.main import main

if __name__ == "__main__":
    main()
