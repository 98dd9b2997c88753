"""`python -m fsdp_lab.probe`: see `fsdp_lab.commands.probe`."""

from __future__ import annotations

import sys

from fsdp_lab.commands.probe import main

if __name__ == "__main__":
    sys.exit(main())
