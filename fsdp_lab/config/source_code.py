"""Digests and commits of the source code that a sweep runs: fsdp_lab's and the user's."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from fsdp_lab.config.target import is_installed, user_root

PACKAGE = Path(__file__).resolve().parent.parent
_MOST_FILES = 2000  # limit for one package
_GIT_LIMIT_S = 10.0
_OF_A_HOOK = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")


def user_packages(paths: Iterable[str]) -> list[str]:
    """Return the names of the user's packages that dotted paths start with.

    Installed packages have versions instead.
    """
    return sorted({path.partition(".")[0] for path in paths if user_root(path) is not None})


def code_digest(packages: Sequence[str]) -> str:
    """Return the SHA-256, shortened to 16 digits, of every Python file of fsdp_lab and of the user's packages."""
    return _digest([PACKAGE, *(root for name in packages if (root := user_root(name)) is not None)])


def user_digest(package: str) -> str:
    """Return the digest of one of the user's packages."""
    root = user_root(package)
    return _digest([] if root is None else [root])


def loaded_files() -> dict[str, str] | None:
    """Return the digest of each file of the user's imported modules; None: a module has no file."""
    files = {str(file) for module in [*sys.modules.values()] if (file := getattr(module, "__file__", None))}
    # modules that PyTorch makes have names without a folder
    own = [file for file in files if os.path.isabs(file) and not is_installed(Path(file).resolve())]
    return {file: _content(Path(file)) for file in own} if all(map(os.path.isfile, own)) else None


def same_files(files: Mapping[str, str]) -> bool:
    """Return whether files have the same content as before. Raises OSError if one was removed."""
    return all(_content(Path(file)) == before for file, before in files.items())


def _content(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _digest(roots: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for root in roots:
        for file in [root] if root.is_file() else _python_files(root):
            with suppress(OSError):  # it cannot be read, so it cannot be imported either
                digest.update(f"{file.relative_to(root.parent)} {_content(file)}\n".encode())
    return digest.hexdigest()[:16]


def commit() -> str:
    """Return the commit of fsdp_lab's checkout; "" for an installed package."""
    # An installation in a virtual environment inside another repository must not get that repository's commit.
    return (_git(PACKAGE, "rev-parse", "HEAD") or "") if _git(PACKAGE, "ls-files", "--", ".") else ""


def users_commit() -> tuple[str, bool]:
    """Return the commit of the working folder's repository, and whether its files differ; "" without one."""
    here = Path()
    changes = _git(here, "status", "--porcelain", "--untracked-files=no")
    return _git(here, "rev-parse", "HEAD") or "", bool(changes)


def _git(folder: Path, *args: str) -> str | None:
    """Return what a git command prints in a folder; None if there is no git, or it fails."""
    command = ["git", "-C", str(folder), *args]
    # A git hook sets variables that name its repository for every folder.
    environment = {name: value for name, value in os.environ.items() if name not in _OF_A_HOOK}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_GIT_LIMIT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _python_files(root: Path) -> list[Path]:
    files = (f for f in root.rglob("*.py") if not any(part.startswith(".") for part in f.relative_to(root).parts))
    return sorted(files)[:_MOST_FILES]
