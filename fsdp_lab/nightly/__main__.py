"""`python -m fsdp_lab.nightly`: a study every night."""

from __future__ import annotations

import sys

from fsdp_lab.commands.nightly import main

if __name__ == "__main__":
    sys.exit(main())
