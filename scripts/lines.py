"""`make lines`: non-blank lines per room, and of the core that a student reads.

    python scripts/lines.py        exits with 1 if the core is over its limit

The core is what one evening's reading covers: the map, the memory, the scheduler, the step, the plain operations
and one model. Docstrings and comments count: they are read too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = {  # a file belongs to the first room that names it
    "kvcache": ("miniserve/kvcache/*.py",),
    "scheduler": ("miniserve/scheduler/*.py",),
    "ops": ("miniserve/ops/*.py", "miniserve/ops/*.cpp"),
    "models": ("miniserve/models/*.py",),
    "http": ("miniserve/server.py", "miniserve/*protocol.py", "miniserve/metrics.py"),
    "cli": ("miniserve/cli.py", "miniserve/__main__.py"),
    "engine": ("miniserve/**/*.py",),  # the rest of the package
    "tests": ("tests/**/*.py",),
    "examples": ("examples/*.py",),
    "benchmarks": ("benchmarks/*.py",),
    "recipes": ("recipes/*.py",),
    "scripts": ("scripts/*.py",),
    "docs": ("docs/*.md", "*.md"),
}
CORE = (
    "miniserve/kvcache/*.py",
    "miniserve/scheduler/*.py",
    "miniserve/request.py",
    "miniserve/batch.py",
    "miniserve/engine.py",
    "miniserve/sampling.py",
    "miniserve/ops/reference.py",
    "miniserve/models/llama.py",
)
CORE_LIMIT = 2000
LINES_PER_MARK = 50


def main(limit: int = CORE_LIMIT) -> int:
    """Print the table; returns the exit code."""
    counted: set[Path] = set()
    for room, patterns in ROOMS.items():
        files = _files(patterns) - counted
        counted |= files
        if files:
            _row(room, _count(files))
    core = _files(CORE)
    total = _count(core)
    _row("core", total, f" of {limit:,} at most")
    if total > limit:
        largest = sorted(core, key=lambda file: _count([file]), reverse=True)[:3]
        names = ", ".join(f"{file.name} {_count([file])}" for file in largest)
        sys.stderr.write(
            f"the core is {total - limit} lines over its limit, more than an evening's reading: delete, or move what "
            f"a first reader can do without to a file outside the core (largest: {names})\n"
        )
    return int(total > limit)


def _files(patterns: Iterable[str]) -> set[Path]:
    return {path for pattern in patterns for path in ROOT.glob(pattern)}


def _count(files: Iterable[Path]) -> int:
    return sum(bool(line.strip()) for file in files for line in file.read_text(encoding="utf-8").splitlines())


def _row(name: str, count: int, note: str = "") -> None:
    sys.stdout.write(f"{name:<10} {count:6,} {'█' * round(count / LINES_PER_MARK)}{note}\n")


if __name__ == "__main__":
    sys.exit(main())
