"""Download the wheels that fsdp_lab needs beside PyTorch, for a machine without network, and pack them into parts.

python -m benchmarks.check_gpu_ray.wheels [--python 3.12] [--platform x86_64] [--part-mib 48] [--without NAME ...]

Versions are those of constraints.txt. Left out: torch, torchvision and everything they bring, and what `--without`
names. Writes to `.wheels/`: manifest.json with the SHA-256 of every part and wheel, and the parts. Carry the manifest
and the parts to the other machine, in as many trips as needed, and run `benchmarks.check_gpu_ray.install` there.
Needs pip and uv, as `make` installs them. Exit status: 0 packed, 1 failed, 2 usage.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

from benchmarks.check_gpu_ray.parts import MANIFEST, Manifest, pack

ROOT = Path(__file__).resolve().parents[2]
_TORCH = ("torch", "torchvision")
_SDIST_ONLY = ("antlr4-python3-runtime",)  # pure Python, but its authors publish no wheel
_NEWEST_GLIBC = 28  # 2.28: what the pinned wheels ask for at most
_LIMIT_S = 1200


class StepError(Exception):
    """A command failed; the message holds the end of its output."""


def run(command: list[str], text: str | None = None) -> str:
    """The command's standard output.

    Raises:
        StepError: it failed, or did not end in time.
    """
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=_LIMIT_S, cwd=ROOT, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise StepError(f"{' '.join(command[:6])} ... did not end within {_LIMIT_S} s") from error
    if done.returncode:
        raise StepError(f"{' '.join(command[:6])} ... failed:\n{done.stderr[-3000:]}")
    return done.stdout


def resolve(requirements: str, python: str, platform: str) -> dict[str, str]:
    """`{name: version}` of the requirements and all that they bring.

    Args:
        requirements: lines of a requirements file, or "" for those of pyproject.toml.
    """
    source = "-" if requirements else "pyproject.toml"
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", source, "--constraint", "constraints.txt"]
    command += ["--python-version", python, "--python-platform", f"{platform}-manylinux_2_{_NEWEST_GLIBC}"]
    command += ["--no-header", "--no-annotate", "--no-emit-index-url"]
    pins = (line.split(";")[0].strip() for line in run(command, requirements or None).splitlines())
    return dict(pin.split("==") for pin in pins if "==" in pin)


def normalised(name: str) -> str:
    """A package's name as resolvers write it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def needed(everything: dict[str, str], of_torch: dict[str, str], without: list[str]) -> dict[str, str]:
    """What has to travel.

    Raises:
        ValueError: `--without` names something that nobody needs.
    """
    if unknown := sorted({normalised(name) for name in without} - everything.keys()):
        raise ValueError(f"--without {' '.join(unknown)}: not among the packages that fsdp_lab needs")
    out = of_torch.keys() | {normalised(name) for name in without}
    kept = {name: version for name, version in everything.items() if name not in out}
    return {name: version for name, version in kept.items() if not name.startswith("nvidia-") and name != "triton"}


def platform_tags(platform: str) -> list[str]:
    """Pip's platform tags, newest glibc first: pip matches each tag exactly."""
    tags = [f"manylinux_2_{minor}_{platform}" for minor in range(_NEWEST_GLIBC, 4, -1)]
    return [*tags, f"manylinux2014_{platform}", f"manylinux2010_{platform}", f"manylinux1_{platform}"]


def download(pins: dict[str, str], folder: Path, python: str, platform: str) -> list[Path]:
    """The wheels of all pins, in `folder`; what is there already is not downloaded again."""
    folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    tags = [word for tag in platform_tags(platform) for word in ("--platform", tag)]
    binary = [f"{name}=={version}" for name, version in pins.items() if name not in _SDIST_ONLY]
    target = ["--python-version", python, "--implementation", "cp", *tags]
    run([*pip, "download", "--quiet", "--no-deps", "--only-binary=:all:", *target, "--dest", str(folder), *binary])
    sources = [f"{name}=={version}" for name, version in pins.items() if name in _SDIST_ONLY]
    if sources:
        run([*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), *sources])
    return [wheel_of(folder, name, version) for name, version in pins.items()]


def wheel_of(folder: Path, name: str, version: str) -> Path:
    """The wheel of a pin: the folder may hold those of earlier calls too.

    Raises:
        StepError: there is none.
    """
    for path in sorted(folder.glob("*.whl")):
        words = path.name.split("-")
        if normalised(words[0]) == name and words[1] == version:
            return path
    raise StepError(f"no wheel of {name}=={version} in {folder}")


def build_set(arguments: argparse.Namespace) -> Manifest:
    """Resolve, download, pack."""
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    (out / ".gitignore").write_text("*\n")
    everything = resolve("", arguments.python, arguments.platform)
    of_torch = resolve("\n".join(_TORCH), arguments.python, arguments.platform)
    pins = needed(everything, of_torch, arguments.without)
    print(f"downloading {len(pins)} wheels for Python {arguments.python}, {arguments.platform}", file=sys.stderr)
    wheels = download(pins, out / f"{arguments.python}-{arguments.platform}", arguments.python, arguments.platform)
    about = {"python": arguments.python, "platform": arguments.platform, "without": sorted(arguments.without)}
    return pack(wheels, out, arguments.part_mib * 2**20, about)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.check_gpu_ray.wheels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--python", default="3.12", help="version of the target's Python")
    parser.add_argument("--platform", choices=("x86_64", "aarch64"), default="x86_64", help="the target's processor")
    parser.add_argument("--part-mib", type=int, default=48, help="size of a part at most")
    parser.add_argument("--without", nargs="+", default=[], metavar="NAME", help="packages that the target has already")
    parser.add_argument("--out", type=Path, default=ROOT / ".wheels")
    arguments = parser.parse_args(words)
    if not re.fullmatch(r"3\.\d+", arguments.python):
        parser.error(f"--python {arguments.python}: use a version like 3.12")
    if arguments.part_mib < 1:
        parser.error(f"--part-mib {arguments.part_mib}: use 1 or more")
    try:
        manifest = build_set(arguments)
    except ValueError as error:
        parser.error(str(error))
    except StepError as error:
        print(error, file=sys.stderr)
        return 1
    size = sum(wheel.bytes for wheel in manifest.wheels) / 2**20
    print(f"{len(manifest.wheels)} wheels, {size:.0f} MiB, in {len(manifest.parts)} parts in {arguments.out}:")
    for part in manifest.parts:
        print(f"  {part.name}  {part.bytes / 2**20:.1f} MiB")
    print(f"Carry them and {MANIFEST} to the target machine, and there, as often as it takes to carry all:")
    print("  python3 -m benchmarks.check_gpu_ray.install PARTS... --target DIR && export PYTHONPATH=DIR")
    return 0


if __name__ == "__main__":
    sys.exit(main())
