"""Resolves the requirements of the images for GPUs, as on a machine with one, without a download.

    python -m ops.release.images

The wheels are gigabytes; their metadata is enough. Nothing may be left to choose: each package that
is resolved must be pinned. With one pin changed, each resolution must fail.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from ops.release.sbom import roots

ROOT = Path(__file__).resolve().parents[2]
#: That of the images: PYTHON_IMAGE in ops/Dockerfile.
PLATFORM = ("--python-version", "3.11.9", "--python-platform", "x86_64-manylinux_2_35")
GPU_FILES = ("constraints.txt", "constraints-gpu.txt")
VLLM_FILE = "constraints-gpu-vllm.txt"


class Unresolved(Exception):
    """There are no versions that fit; the message is the resolver's."""


def main() -> int:
    """The command; returns its exit code."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    of_gpu = list(map(str, roots(project)))
    # The worker takes any version of llguidance that vLLM asks for.
    of_vllm = [*map(str, roots(project, extras=["worker"])), "vllm", "llguidance"]
    faults = [
        *faults_of("gpu", ["torch", "numpy", *of_gpu], pins_in(*GPU_FILES)),
        *faults_of("gpu-vllm", of_vllm, pins_in(VLLM_FILE), is_exact=True),
    ]
    for fault in faults:
        print(fault)
    return 1 if faults else 0


def pins_in(*names: str) -> dict[str, str]:
    """The pins of some files: version by canonical name."""
    lines = [line for name in names for line in (ROOT / name).read_text().splitlines()]
    pins = [line.split("==") for line in lines if re.match(r"\w", line)]
    return {canonical(name): version for name, version in pins}


def canonical(name: str) -> str:
    """The name of a package as package indexes compare names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def faults_of(
    image: str, requirements: list[str], pins: dict[str, str], *, is_exact: bool = False
) -> list[str]:
    """What is wrong with the pins of an image; with `is_exact` none may be unused."""
    try:
        found = resolved(requirements, pins)
    except Unresolved as reason:
        return [f"{image}: {reason}"]
    print(f"{image}: {len(found)} packages resolve, torch {found['torch']}")
    faults = [f"{image}: {name} has no pin" for name in sorted(found.keys() - pins.keys())]
    if is_exact:
        faults += [f"{image}: nobody needs {name}" for name in sorted(pins.keys() - found.keys())]
    try:
        resolved(requirements, pins | {"triton": "3.3.1"})
    except Unresolved:
        return faults
    return [*faults, f"{image}: another triton than torch asks for was not noticed"]


def resolved(requirements: list[str], pins: dict[str, str]) -> dict[str, str]:
    """Version by name of what pip would install; Unresolved if nothing fits."""
    folder = ROOT / "build" / "images"
    folder.mkdir(parents=True, exist_ok=True)
    wanted, constraints = folder / "requirements.txt", folder / "constraints.txt"
    wanted.write_text("\n".join(requirements) + "\n")
    constraints.write_text("".join(f"{name}=={version}\n" for name, version in pins.items()))
    command = [
        *(sys.executable, "-m", "uv", "pip", "compile", "--no-config", "--system-certs"),
        *("--only-binary", ":all:", *PLATFORM, "--no-header", "--no-annotate", "--quiet"),
        *("--constraint", str(constraints), str(wanted)),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise Unresolved(ended.stderr.strip())
    lines = ended.stdout.splitlines()
    return {canonical(name): version for name, version in (line.split("==") for line in lines)}


if __name__ == "__main__":
    sys.exit(main())
