"""`python -m fsdp_lab.read`: what a file of accelerate, transformers' Trainer or torchtitan means here."""

from __future__ import annotations

import sys

from fsdp_lab.commands.read import main

if __name__ == "__main__":
    sys.exit(main())
