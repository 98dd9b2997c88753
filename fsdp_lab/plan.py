"""`python -m fsdp_lab.plan`: what a step does, as a file to commit and check."""

from __future__ import annotations

import sys

from fsdp_lab.commands.plan import main

if __name__ == "__main__":
    sys.exit(main())
