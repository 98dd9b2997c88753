"""`python -m fsdp_lab.report`: write the report of a sweep again."""

from __future__ import annotations

import sys

from fsdp_lab.commands.report import main

if __name__ == "__main__":
    sys.exit(main())
