"""`python -m fsdp_lab.probe`: see `fsdp_lab.commands.probe`."""

from __future__ import annotations

import os
import sys

from fsdp_lab.commands.probe import main

if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # gloo's threads may outlive the interpreter and abort a finished process
