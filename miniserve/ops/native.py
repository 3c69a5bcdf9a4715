"""Builds and loads the C++ of the `cpu` kernel set.

The sources in `csrc/` are compiled with the system's compiler at first use, for this very CPU, into a user cache
(`$MINISERVE_CACHE`, else `~/.cache/miniserve`) under a name made of the sources, the compiler and the CPU. Without a
compiler there is no library, and the caller takes another kernel set.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from hashlib import sha256
from pathlib import Path

log = logging.getLogger(__name__)

SOURCES = Path(__file__).with_name("csrc")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=fast", "-fno-math-errno", "-pthread")


class BuildError(Exception):
    """There is no compiler, or it refuses the sources."""


def load_library(flags: tuple[str, ...] = FLAGS) -> ctypes.CDLL:
    """The library for this CPU, from the cache or freshly built (about ten seconds).

    Raises:
        BuildError: it cannot be built or loaded here.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
    if compiler is None:
        raise BuildError("no C++ compiler (g++ or clang++) was found")
    library = _cache() / f"kernels-{_fingerprint(compiler, flags)}.so"
    if not library.is_file():
        log.info("compiling the CPU kernels for this machine (once)")
        _build(compiler, flags, library)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise BuildError(f"{library} cannot be loaded: {error}") from None


def _build(compiler: str, flags: tuple[str, ...], library: Path) -> None:
    """Compile beside the final place and rename: two processes that build at once do not disturb each other."""
    try:
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            output = Path(scratch) / library.name
            command = [*shlex.split(compiler), *flags, str(SOURCES / "kernels.cpp"), "-o", str(output)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            if done.returncode != 0:
                raise BuildError(f"{compiler} failed:\n{done.stderr[-2000:]}")
            output.replace(library)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{compiler} failed in {library.parent}: {error}; see CXX and MINISERVE_CACHE") from None


def _cache() -> Path:
    chosen = os.environ.get("MINISERVE_CACHE")
    try:
        folder = Path(chosen) if chosen else Path.home() / ".cache" / "miniserve"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home
        raise BuildError(f"there is no cache folder: {error}; set MINISERVE_CACHE to one") from None
    return folder


def _fingerprint(compiler: str, flags: tuple[str, ...]) -> str:
    parts = [compiler, *flags, platform.machine(), _cpu_features()]
    sources = sorted(path for path in SOURCES.glob("*") if path.suffix in (".h", ".cpp"))
    parts += [path.read_text(encoding="utf-8") for path in sources]
    return sha256("\0".join(parts).encode()).hexdigest()[:20]


def _cpu_features() -> str:
    """What `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="ignore").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
