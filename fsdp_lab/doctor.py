"""`python -m fsdp_lab.doctor`: check this machine."""

from __future__ import annotations

import sys

from fsdp_lab.commands.doctor import main

if __name__ == "__main__":
    sys.exit(main())
