"""The cpu kernels in several builds of one source.

Builds lie in the user's cache like the package's own, so only the first run compiles (about ten seconds each).
"""

from __future__ import annotations

import platform
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from miniserve.ops.cpu import CpuOps
from miniserve.ops.native import FLAGS, BuildError, load_library

WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-psabi")  # psabi: no vector crosses the C interface


def flags_for(march: str, *more: str) -> tuple[str, ...]:
    """The package's flags for another CPU than this one."""
    return (*(f"-march={march}" if flag == "-march=native" else flag for flag in FLAGS), *more)


EMULATION = Path(__file__).with_name("emulated_dots.h")
BUILDS = {
    "native": FLAGS,
    "avx2": flags_for("haswell", *WARNINGS),
    "x86-64": flags_for("x86-64", "-O1", *WARNINGS),
    "dot-products": (
        *(*FLAGS, "-O1", *WARNINGS, "-include", str(EMULATION)),
        f"-DCONTENT={zlib.crc32(EMULATION.read_bytes())}",  # flags name the cached build
    ),
}
"""`native` and `avx2` as users have them; `x86-64` has no FMA; `dot-products` takes the
branches of AVX512-BF16 and AVX512-VNNI."""


def runs_here(name: str) -> bool:
    """Whether this CPU has the instructions, and `native` does not cover the build."""
    if name == "native":
        return True
    has = _cpu_features()
    if platform.machine() != "x86_64":
        return False
    return {
        "avx2": "avx2" in has and "fma" in has,
        "x86-64": True,
        "dot-products": "avx512f" in has and not has & {"avx512_bf16", "avx512_vnni"},
    }[name]


@dataclass(frozen=True)
class Build:
    """One build of the kernels, with two threads."""

    name: str
    flags: tuple[str, ...]
    ops: CpuOps
    int8_ops: CpuOps
    rounds_activations: bool  # to bfloat16, before they meet bfloat16 weights, keys and values


@pytest.fixture(scope="session")
def builds() -> dict[str, Build]:
    """All builds that run here, compiled two at a time."""
    names = [name for name in BUILDS if runs_here(name)]
    try:
        with ThreadPoolExecutor(2) as compilers:
            list(compilers.map(load_library, [BUILDS[name] for name in names]))
    except BuildError as error:
        if "no C++ compiler" in str(error):
            pytest.skip(str(error))
        raise
    return {
        name: Build(
            name=name,
            flags=BUILDS[name],
            ops=CpuOps(num_threads=2, flags=BUILDS[name]),
            int8_ops=CpuOps(num_threads=2, flags=BUILDS[name], quantization="int8"),
            rounds_activations=name == "dot-products" or (name == "native" and "avx512_bf16" in _cpu_features()),
        )
        for name in names
    }


@pytest.fixture(scope="session", params=BUILDS)
def build(request: pytest.FixtureRequest, builds: dict[str, Build]) -> Build:
    """Each build that runs here, one after the other."""
    if request.param not in builds:
        pytest.skip("this CPU cannot run the build, or `native` is the same")
    return builds[request.param]


def _cpu_features() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="ignore").splitlines()
    except OSError:
        return set()
    return set(next((line for line in lines if line.startswith("flags")), "").split())
