"""How the C++ of the `cpu` set is built, kept and found, and what happens where it cannot be."""

from __future__ import annotations

import logging
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import WARNINGS, Build, flags_for

from miniserve.errors import ConfigError
from miniserve.ops import load_ops, native
from miniserve.ops.cpu import CpuOps
from miniserve.ops.native import FLAGS, BuildError, load_library
from miniserve.ops.reference import ReferenceOps

CPU = torch.device("cpu")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("MINISERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def compiler(tmp_path: Path, cache: Path, builds: dict[str, Build], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in that notes each call in `calls` and hands out the library that the real one made."""
    with monkeypatch.context() as real_cache:
        real_cache.delenv("MINISERVE_CACHE")
        made = load_library()._name
    return _script(tmp_path / "compiler", f'echo "$@" >> {tmp_path}/calls\ncp {made} "$out"')


def _script(path: Path, body: str) -> Path:
    """A compiler: `body` sees the output's name as $out."""
    path.write_text(f"#!/bin/sh\nfor out; do :; done\n{body}\n")
    path.chmod(0o755)
    return path


def _calls(tmp_path: Path) -> list[str]:
    return (tmp_path / "calls").read_text().splitlines()


# --- The cache ------------------------------------------------------------------------------------------------------


def test_a_library_is_compiled_once_for_this_cpu(
    compiler: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(compiler))
    first, second = load_library(), load_library()
    (call,) = _calls(tmp_path)
    assert "-march=native" in call and str(native.SOURCES / "kernels.cpp") in call
    assert [first._name, second._name] == 2 * [str(file) for file in cache.iterdir()]


def test_another_compiler_other_flags_or_another_source_are_another_library(
    compiler: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(compiler))
    load_library()
    load_library((*FLAGS, "-O1"))
    monkeypatch.setenv("CXX", str(shutil.copy(compiler, tmp_path / "another")))
    load_library()
    changed = shutil.copytree(native.SOURCES, tmp_path / "csrc")
    with (changed / "simd.h").open("a") as source:
        source.write("// another\n")
    monkeypatch.setattr(native, "SOURCES", changed)
    load_library()
    (changed / "notes.swp").write_bytes(b"\xff")  # is no source
    load_library()
    assert len(_calls(tmp_path)) == len(list(cache.iterdir())) == 4


def test_a_compiler_may_come_with_arguments(
    compiler: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", f"env {compiler}")
    load_library()
    assert len(_calls(tmp_path)) == 1


def test_two_processes_build_at_once(compiler: Path, cache: Path, tmp_path: Path) -> None:
    """Each waits in its compiler until the other has come as far; both get a whole library."""
    meet = f"touch {tmp_path}/here.$$\nwhile [ $(ls {tmp_path}/here.* | wc -l) -lt 2 ]; do sleep 0.01; done"
    _script(compiler, f"{meet}\n{compiler.read_text()}")
    program = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("native", {native.__file__!r})  # without torch
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.load_library()
"""
    environment = {"CXX": str(compiler), "MINISERVE_CACHE": str(cache), "PATH": "/usr/bin:/bin"}
    processes = [subprocess.Popen([sys.executable, "-c", program], env=environment) for _ in range(2)]
    assert [process.wait(timeout=60) for process in processes] == [0, 0]
    assert len(_calls(tmp_path)) == 2 and len(list(cache.iterdir())) == 1


# --- Where it cannot be built ---------------------------------------------------------------------------------------


def _no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")


def _failing_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", str(_script(tmp_path / "failing", 'echo "cannot do that" >&2\ntouch "$out"\nexit 1')))


def _missing_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")


def _broken_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", str(_script(tmp_path / "broken", 'echo text > "$out"')))


def _no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MINISERVE_CACHE", str(tmp_path / "file"))


def _cache_is_read_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(native.tempfile, "TemporaryDirectory", refuse)


def _no_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("MINISERVE_CACHE")
    monkeypatch.setattr(Path, "home", fail)


OBSTACLES = {
    _no_compiler: r"no C\+\+ compiler \(g\+\+ or clang\+\+\) was found",
    _failing_compiler: "failing failed:\ncannot do that",
    _missing_compiler: "no-such-compiler failed .*No such file",
    _broken_library: "cannot be loaded: .*",
    _no_cache: "there is no cache folder: .*; set MINISERVE_CACHE to one",
    _cache_is_read_only: "Permission denied; see CXX and MINISERVE_CACHE",
    _no_home: "there is no cache folder: Could not determine home directory",
}


@pytest.mark.parametrize("obstruct", OBSTACLES, ids=lambda obstruct: obstruct.__name__.strip("_"))
def test_what_cannot_be_built_gives_way_to_the_reference(
    obstruct: object, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reason = OBSTACLES[obstruct]
    obstruct(monkeypatch, tmp_path)
    with pytest.raises(BuildError, match=reason):
        load_library()
    with pytest.raises(ConfigError, match=f"ops='cpu': .*{reason}"):
        load_ops("cpu", CPU)
    with caplog.at_level(logging.WARNING):
        assert isinstance(load_ops("auto", CPU), ReferenceOps)
    (record,) = caplog.records
    assert "reference" in record.getMessage()
    left = list(cache.iterdir()) if cache.is_dir() else []
    assert obstruct is _broken_library or not left


def test_auto_takes_the_cpu_set_where_it_can(builds: dict[str, Build], caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(load_ops("auto", CPU), CpuOps) and isinstance(load_ops("cpu", CPU), CpuOps)
    assert isinstance(load_ops("auto", CPU, "float16"), ReferenceOps)
    with pytest.raises(ConfigError, match="float16"):
        load_ops("cpu", CPU, "float16")


# --- Warnings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiler", ["g++", "clang++"])
@pytest.mark.parametrize("march", ["native", "cooperlake"])
def test_the_sources_compile_without_a_warning(compiler: str, march: str) -> None:
    """`cooperlake` is the oldest with AVX512-BF16, whether this CPU has it or not."""
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler}")
    if march != "native" and platform.machine() != "x86_64":
        pytest.skip("this is another architecture's")
    flags = [flag for flag in flags_for(march, *WARNINGS) if flag != "-shared"]  # nothing is linked
    command = [compiler, "-fsyntax-only", *flags, str(native.SOURCES / "kernels.cpp")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
