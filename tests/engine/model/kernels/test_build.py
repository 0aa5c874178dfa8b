"""How the kernels are built: which variant, for which caches, where it is kept, what may fail."""

import fcntl
import multiprocessing
import os
import re
import stat
import subprocess
from pathlib import Path

import pytest

from engine.model.kernels import build, library
from engine.model.kernels.build import VARIANTS, KernelsUnavailable, best_variant, library_path
from engine.model.kernels.library import load_library
from tests.service.fake_model import eventually

FUNCTIONS = set(re.findall(r"\blibrary\.(quire_\w+)", Path(library.__file__).read_text()))
#: All functions of the kernels, without what they compute: it compiles in a moment.
SMALL_SOURCE = f"""
#include <cstdint>
extern "C" {{
int64_t quire_abi() {{ return {library.ABI}; }}
{" ".join(f"void {name}() {{}}" for name in sorted(FUNCTIONS - {"quire_abi"}))}
}}
"""


@pytest.fixture
def small_source(tmp_path, monkeypatch):
    """What is compiled is `SMALL_SOURCE`, with the flags of the kernels."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "decoder.cpp").write_text(SMALL_SOURCE)
    monkeypatch.setattr(build, "SOURCES", folder)


def test_the_best_variant_is_the_first_that_the_processor_can_run(monkeypatch):
    monkeypatch.setattr(build, "_processor_features", frozenset)
    assert best_variant().name == "portable"
    monkeypatch.setattr(build, "_processor_features", lambda: build._AVX512)
    assert best_variant().name == "avx512"


def test_the_matrix_unit_is_used_only_where_the_system_permits_it(tmp_path, monkeypatch):
    features = VARIANTS[0].features
    assert {"amx_tile", "amx_bf16"} <= features
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor: 0\nflags: {' '.join(sorted(features))}\n")
    monkeypatch.setattr(build, "CPUINFO", cpuinfo)
    for permitted, name in ((True, "amx_bf16"), (False, "avx512_bf16")):
        monkeypatch.setattr(build, "_may_use_matrix_unit", lambda permitted=permitted: permitted)
        assert best_variant().name == name


def write_caches(folder, *caches):
    """As the system tells of them: level, type and size of each."""
    for number, cache in enumerate(caches):
        (folder / f"index{number}").mkdir(parents=True)
        for name, value in zip(("level", "type", "size"), cache, strict=True):
            (folder / f"index{number}" / name).write_text(f"{value}\n")


@pytest.mark.parametrize(
    ("size", "level"), [("32K", 2), ("16K", 2), ("48K", 1), ("64K", 1), ("", 1), ("large", 1)]
)
def test_what_is_needed_later_goes_to_the_nearest_cache_if_that_is_large(
    size, level, tmp_path, monkeypatch
):
    instructions, second = (1, "Instruction", "32K"), (2, "Unified", "32K")
    write_caches(tmp_path / "split", instructions, (1, "Data", size), second)
    write_caches(tmp_path / "one", (1, "Unified", size), second)
    for folder in ("split", "one"):
        monkeypatch.setattr(build, "CACHES", tmp_path / folder)
        assert best_variant().fetch_level == level


def test_where_nobody_tells_how_large_the_nearest_cache_is_it_is_taken_for_large(
    tmp_path, monkeypatch
):
    write_caches(tmp_path / "second", (1, "Instruction", "32K"), (2, "Unified", "32K"))
    (tmp_path / "silent" / "index0").mkdir(parents=True)
    for folder in ("second", "silent", "none"):
        monkeypatch.setattr(build, "CACHES", tmp_path / folder)
        assert best_variant().fetch_level == 1


def test_the_nearest_cache_of_this_machine_is_found():
    """What the C library says of it, if that is a machine that tells."""
    asked = subprocess.run(["getconf", "LEVEL1_DCACHE_SIZE"], capture_output=True, text=True)
    size = int(asked.stdout.strip() or 0) if asked.returncode == 0 else 0
    if size <= 0 or not build.CACHES.is_dir():
        pytest.skip("this system does not say how large its caches are")
    assert best_variant().fetch_level == (2 if size <= 32 << 10 else 1)


def test_a_library_is_compiled_once_and_kept_where_only_its_owner_writes(
    small_source, tmp_path, monkeypatch
):
    cache = tmp_path / "kernels"
    monkeypatch.setenv("QUIRE_KERNEL_CACHE", str(cache))
    commands = []
    run = build._run
    monkeypatch.setattr(build, "_run", lambda *command: commands.append(command) or run(*command))
    path = library_path(VARIANTS[-1])
    assert library_path(VARIANTS[-1]) == path
    assert sum("-shared" in command for command in commands) == 1
    assert list(cache.iterdir()) == [path]
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_processes_that_start_at_once_compile_once(small_source, tmp_path, monkeypatch):
    """Each worker of a machine needs the same library, and a compilation takes ten seconds."""
    compiler, calls = tmp_path / "counting", tmp_path / "calls"
    (tmp_path / "kernels").mkdir(mode=0o700)
    compiler.write_text(f'#!/bin/sh\n[ $1 = --version ] || echo >> {calls}\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("QUIRE_KERNEL_CACHE", str(tmp_path / "kernels"))
    forked = multiprocessing.get_context("fork")
    paths = forked.SimpleQueue()
    handle = os.open(tmp_path / "kernels", os.O_RDONLY)
    # Until both are at it, nobody may compile.
    fcntl.flock(handle, fcntl.LOCK_EX)

    def compile_one() -> None:
        os.close(handle)  # A lock lasts until no process has its handle.
        paths.put(library_path(VARIANTS[-1]))

    both = [forked.Process(target=compile_one, daemon=True) for _ in range(2)]
    for process in both:
        process.start()
    eventually(lambda: all(waits_for_a_lock(process.pid) for process in both), seconds=60)
    os.close(handle)
    for process in both:
        process.join(60)
        assert process.exitcode == 0
    assert paths.get() == paths.get()
    assert calls.read_text() == "\n"


def waits_for_a_lock(process_id: int) -> bool:
    return any(
        line.split()[1] == "->" and line.split()[5] == str(process_id)
        for line in Path("/proc/locks").read_text().splitlines()
    )


def test_a_machine_without_a_compiler_takes_what_was_built_elsewhere(
    small_source, tmp_path, monkeypatch
):
    monkeypatch.setenv("QUIRE_KERNEL_CACHE", str(tmp_path / "kernels"))
    path = library_path(best_variant())
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert library_path(best_variant()) == path
    monkeypatch.setattr(build, "_digest_of_sources", lambda variant: "other sources")
    with pytest.raises(KernelsUnavailable, match="no C"):
        library_path(best_variant())


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("a.cpp: note\nerror: no", "error: no"),
        ("ld: final link failed: full\ncollect2: error: ld", "ld: final link failed: full"),
        ("collect2: error: ld returned 1", "collect2: error: ld returned 1"),
        ("Bus", "no reason given"),
    ],
)
def test_a_compiler_that_fails_leaves_nothing_behind_but_its_reason(
    tmp_path, monkeypatch, said, reason
):
    compiler = tmp_path / "broken"
    compiler.write_text(
        f"#!/bin/sh\n[ $1 = --version ] || {{ cat >&2 <<END; exit 1; }}\n{said}\nEND\n"
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("QUIRE_KERNEL_CACHE", str(tmp_path / "kernels"))
    with pytest.raises(KernelsUnavailable, match=f"the compiler failed: {re.escape(reason)}$"):
        library_path(best_variant())
    assert list((tmp_path / "kernels").iterdir()) == []


def test_without_a_compiler_or_a_place_for_the_library_the_reason_is_one_sentence(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("QUIRE_KERNEL_CACHE", os.devnull)
    with pytest.raises(KernelsUnavailable, match="cannot be stored"):
        library_path(best_variant())
    monkeypatch.setenv("QUIRE_KERNEL_CACHE", str(tmp_path / "kernels"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(KernelsUnavailable, match="no C"):
        library_path(best_variant())


def test_where_nobody_has_a_home_the_reason_is_one_sentence(monkeypatch):
    """A container may run under a number that no user has."""

    def nobody(number: int) -> None:
        raise KeyError(number)

    for name in ("QUIRE_KERNEL_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    with pytest.raises(KernelsUnavailable, match="QUIRE_KERNEL_CACHE"):
        library_path(best_variant())


@pytest.mark.parametrize("content", [b"", b"no library"])
def test_a_library_that_is_broken_is_compiled_again(content, small_source, tmp_path, monkeypatch):
    """A machine that lost its power may have kept a file's name and lost what was in it."""
    monkeypatch.setenv("QUIRE_KERNEL_CACHE", str(tmp_path / "kernels"))
    path = library_path(VARIANTS[-1])
    path.write_bytes(content)
    assert load_library.__wrapped__(VARIANTS[-1]).quire_abi() == library.ABI
    assert list(path.parent.iterdir()) == [path]


def test_nothing_is_run_from_a_folder_that_others_may_write_to(tmp_path, monkeypatch):
    monkeypatch.setenv("QUIRE_KERNEL_CACHE", str(tmp_path))
    tmp_path.chmod(0o777)
    with pytest.raises(KernelsUnavailable, match="other users can write"):
        library_path(best_variant())


def test_the_sources_compile_without_a_warning():
    """`make check-native` compiles every variant, with the warnings that need the optimiser."""
    compiler = build._compiler()
    assert compiler is not None
    command = [compiler, "-Wall", "-Wextra", "-Werror", "-fsyntax-only", *build._FLAGS]
    flags = [*best_variant().options, *build.units()]
    finished = subprocess.run([*command, *flags], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
