"""Starts the check, and says what is not installed where something is not."""

from __future__ import annotations

import importlib.util
import sys

NEEDED = ("torch", "torchvision", "ray", "mlflow", "hydra", "psutil")


def main() -> int:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"check_gpu_ray: {sys.executable} has no {', '.join(missing)}; install fsdp_lab into it, or on a machine "
            "without network the wheels that `make gpu-wheels` packs (benchmarks/README.md)",
            file=sys.stderr,
        )
        return 2
    from benchmarks.check_gpu_ray.command import main as check

    return check()


if __name__ == "__main__":
    sys.exit(main())
