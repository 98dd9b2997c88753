"""`python -m fsdp_lab.predict`: score an exported model."""

from __future__ import annotations

import sys

from fsdp_lab.commands.predict import main

if __name__ == "__main__":
    sys.exit(main())
