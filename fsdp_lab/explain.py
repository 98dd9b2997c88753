"""`python -m fsdp_lab.explain`: why a GPU's memory ran out, and what would fit."""

from __future__ import annotations

import sys

from fsdp_lab.commands.explain import main

if __name__ == "__main__":
    sys.exit(main())
