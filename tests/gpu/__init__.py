"""What only a GPU can show: losses, memory, speed, failures and files. `conftest.py` says how to run it."""

from __future__ import annotations

import importlib.util
import sys

if importlib.util.find_spec("yaml") is None:  # here: the ranks import this package, too
    from tests.gpu import plain_yaml

    sys.modules["yaml"] = plain_yaml
