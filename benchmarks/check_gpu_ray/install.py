"""Install the wheels that `benchmarks.check_gpu_ray.wheels` packed, on a machine without network.

python3 -m benchmarks.check_gpu_ray.install PARTS... (--target DIR | --venv DIR) [--staging DIR]

PARTS are the parts carried so far, with `manifest.json` among them or beside them; a folder stands for all its parts.
Each call copies them to the staging folder, so the parts may arrive in several calls. Once all have arrived, they are
verified, joined, installed by pip, and compiled to bytecode. Standard library only.
Exit status: 0 installed, 1 a damaged file (named) or pip failed, 2 usage, 3 parts are missing (named).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.check_gpu_ray.parts import (
    MANIFEST,
    DamagedError,
    Manifest,
    matches,
    set_id,
    unpack,
)
from fsdp_lab.files import whole, write_text

_MARK = ".fsdp_lab_wheels"  # in the target: the set that is installed
_LIMIT_S = 900
# The wheel of pip that comes with Python: environments made by uv have no pip of their own.
_BUNDLED_PIP = "import ensurepip, pathlib; print(*pathlib.Path(ensurepip.__file__).parent.glob('_bundled/pip-*.whl'))"


def expand(given: list[Path]) -> tuple[list[Path], list[Path]]:
    """`(parts, manifests)` among the given files and folders, and the manifests beside the parts.

    Raises:
        ValueError: a file that does not exist, or is neither.
    """
    files = [file for path in given for file in (sorted(path.glob("wheels-*.part")) if path.is_dir() else [path])]
    manifests = [path / MANIFEST for path in given if (path / MANIFEST).is_file()]
    parts = []
    for path in files:
        if not path.is_file():
            raise ValueError(f"{path}: no such file")
        if path.name == MANIFEST:
            manifests.append(path)
        elif set_id(path.name):
            parts.append(path)
            manifests += [path.with_name(MANIFEST)] if path.with_name(MANIFEST).is_file() else []
        else:
            raise ValueError(f"{path}: neither a part nor {MANIFEST}")
    return parts, manifests


def stage(given: list[Path], staging: Path) -> tuple[Path, Manifest | None, list[str]]:
    """Copy what was carried to the staging folder of its set.

    Returns:
        The set's folder, its manifest where that has arrived, and the names of damaged parts, which are not kept.

    Raises:
        ValueError: files of several sets, or a part that is not in the manifest.
    """
    parts, manifests = expand(given)
    read = {manifest.id: manifest for manifest in map(Manifest.read, manifests)}
    ids = {set_id(part.name) for part in parts} or read.keys()
    if len(ids) != 1:
        raise ValueError(f"files of {len(ids)} sets of wheels ({', '.join(sorted(map(str, ids)))}); give those of one")
    identity = str(next(iter(ids)))
    folder = staging / identity
    folder.mkdir(parents=True, exist_ok=True)
    if identity in read:
        read[identity].write(folder)
    manifest = Manifest.read(folder / MANIFEST) if (folder / MANIFEST).exists() else None
    known = {entry.name: entry for entry in manifest.parts} if manifest else {}
    damaged = []
    for part in parts:
        entry = known.get(part.name)
        if manifest and entry is None:
            raise ValueError(f"{part}: not in the manifest of set {identity}")
        if entry and not matches(part, entry):
            damaged.append(part.name)
        elif entry is None or not matches(folder / part.name, entry):
            with whole(folder / part.name) as making:
                shutil.copyfile(part, making)
    return folder, manifest, damaged


def pip_command(python: str) -> list[str]:
    """The command that runs pip: that of this Python, or the one that came with it.

    Raises:
        ValueError: there is neither.
    """
    if subprocess.run([python, "-c", "import pip"], capture_output=True, check=False).returncode == 0:
        return [python, "-m", "pip"]
    lines = subprocess.run([python, "-c", _BUNDLED_PIP], capture_output=True, text=True, check=False).stdout.split()
    if not lines:
        raise ValueError(f"{python} has no pip, and no copy of it that comes with Python")
    return [python, f"{lines[-1]}/pip"]


def install(wheels: list[Path], target: Path | None, venv: Path | None) -> int:
    """Pip's exit status. Nothing is looked up: these wheels and no other."""
    where = ["--upgrade", "--target", str(target)] if target else []
    into = ["--python", str(venv / "bin" / "python")] if venv else []
    command = [*pip_command(sys.executable), *into, "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    command += ["--no-cache-dir", "--disable-pip-version-check", *where, *map(str, wheels)]
    return subprocess.run(command, timeout=_LIMIT_S, check=False).returncode


def compile_all(target: Path) -> None:
    """Compile to bytecode on all cores: otherwise each of a trial's processes compiles Ray for itself, where Python is
    told to write no bytecode. Templates that are no valid Python stay as they are."""
    command = [sys.executable, "-m", "compileall", "-q", "-j", "0", str(target)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run(command, env=environment, timeout=_LIMIT_S, capture_output=True, check=False)


def install_set(arguments: argparse.Namespace) -> int:
    """Stage what was given; install when the set is whole."""
    folder, manifest, damaged = stage(arguments.parts, arguments.staging)
    if damaged:
        print(f"damaged, carry again: {', '.join(damaged)}", file=sys.stderr)
        return 1
    if manifest is None:
        print(f"staged in {folder}; missing: {MANIFEST}, which names the other parts", file=sys.stderr)
        return 3
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if arguments.target and (packed_for := manifest.about.get("python", here)) != here:
        print(
            f"these wheels are for Python {packed_for}, and this is Python {here}; pack them again with: "
            f"make gpu-wheels ARGS='--python {here}'",
            file=sys.stderr,
        )
        return 2
    missing = [part.name for part in manifest.parts if not (folder / part.name).is_file()]
    if missing:
        arrived = len(manifest.parts) - len(missing)
        print(f"{arrived} of {len(manifest.parts)} parts in {folder}; missing: {', '.join(missing)}", file=sys.stderr)
        return 3
    place = arguments.target or arguments.venv
    mark = place / _MARK
    if mark.exists() and mark.read_text() == manifest.id:
        print(f"{place} has this set already")
        return 0
    wheels = unpack(manifest, folder, folder / "wheels")
    status = install(wheels, arguments.target, arguments.venv)
    if status:
        print(f"pip failed with exit status {status}", file=sys.stderr)
        return 1
    if arguments.target:
        compile_all(arguments.target)
    write_text(mark, manifest.id)
    print(f"installed {len(wheels)} wheels into {place}" + (f": export PYTHONPATH={place}" if arguments.target else ""))
    return 0


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.check_gpu_ray.install",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="+", type=Path, metavar="PARTS")
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("--target", type=Path, help="a folder for PYTHONPATH")
    place.add_argument("--venv", type=Path, help="an existing virtual environment")
    parser.add_argument(
        "--staging",
        type=Path,
        default=Path(tempfile.gettempdir(), "fsdp_lab_wheels"),
        help="where parts wait for the others (a folder for temporary files)",
    )
    arguments = parser.parse_args(words)
    try:
        return install_set(arguments)
    except DamagedError as error:
        print(f"damaged, carry again: {', '.join(error.names)}", file=sys.stderr)
        return 1
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
