"""`python -m fsdp_lab.forecast`: predict memory and speed before anything runs."""

from __future__ import annotations

import sys

from fsdp_lab.commands.forecast import main

if __name__ == "__main__":
    sys.exit(main())
