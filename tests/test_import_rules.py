"""Who may import whom, and what no module may hold: read from the source, so that a rule breaks in the test and not on
somebody's machine. `ROOMS` is the drawing of docs and architecture as data; a new module has to be entered there.

    cli, server ─► async_engine ─► engine ─► inbox, intake, answer, scheduler, batch, models, sampling, tokenizer,
                                             kvcache, ops, report, machine
                                    models ─► ops, kvcache          ops ─► batch, kvcache
                                    all ─► request, output, config, checks, errors       never back
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import write_llama

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "miniserve"
FILES = sorted(PACKAGE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}

EVERYWHERE = {"errors", "checks", "request", "output", "config"}
KVCACHE = {"kvcache.sharing", "kvcache.layout", "kvcache.block_manager", "kvcache.pool"}
ROOMS: dict[str, set[str]] = {
    "errors": set(),
    "checks": {"errors"},
    "request": {"checks", "errors"},
    "output": set(),
    "config": {"checks", "errors"},
    "kvcache": set(),
    "kvcache.sharing": EVERYWHERE,
    "kvcache.layout": EVERYWHERE | {"kvcache.sharing"},
    "kvcache.block_manager": EVERYWHERE | {"kvcache.layout", "kvcache.sharing"},
    "kvcache.pool": EVERYWHERE | {"kvcache.layout", "kvcache.sharing"},
    "scheduler": EVERYWHERE | {"kvcache.block_manager"},
    "batch": EVERYWHERE | {"kvcache.block_manager", "kvcache.layout", "scheduler"},
    "ops": EVERYWHERE | KVCACHE | {"batch"},
    "models": EVERYWHERE | {"batch", "ops", "kvcache.pool", "kvcache.sharing", "kvcache.layout"},
    "sampling": EVERYWHERE,
    "tokenizer": EVERYWHERE,
    "answer": EVERYWHERE | {"tokenizer"},
    "inbox": EVERYWHERE | {"answer"},
    "intake": EVERYWHERE | {"answer", "tokenizer"},
    "machine": EVERYWHERE | {"kvcache.layout"},
    "report": EVERYWHERE | {"kvcache.sharing", "kvcache.layout"},
    "engine": EVERYWHERE
    | KVCACHE
    | {
        "answer",
        "inbox",
        "intake",
        "machine",
        "scheduler",
        "batch",
        "models",
        "sampling",
        "tokenizer",
        "ops",
        "report",
    },
    "async_engine": EVERYWHERE | {"engine"},
    "protocol": EVERYWHERE,
    "chat_protocol": EVERYWHERE | {"protocol"},
    "server": EVERYWHERE | {"async_engine", "engine", "protocol", "chat_protocol", "face"},
    "cli": EVERYWHERE | {"face", "engine", "async_engine", "server", "report", "models", "kvcache.layout"},
    "__main__": {"cli"},
    "face": EVERYWHERE | {"engine", "async_engine"},
}
"""Room -> the rooms that it may import, besides itself. `face` is `miniserve/__init__.py`."""

PURE = {
    "errors",
    "checks",
    "request",
    "output",
    "config",
    "scheduler",
    "kvcache",
    "kvcache.sharing",
    "kvcache.layout",
    "kvcache.block_manager",
}
"""Rooms that import the standard library only."""

HOMES: dict[str, set[str]] = {
    "fastapi": {"server.py"},
    "starlette": {"server.py"},
    "uvicorn": {"server.py"},
    "sse_starlette": {"server.py"},
    "pydantic": {"protocol.py"},
    "flash_attn": {"ops/cuda.py"},
    "safetensors": {"models/checkpoint.py"},
    "transformers": {"tokenizer.py"},
    "tokenizers": {"tokenizer.py"},
    "sentencepiece": {"tokenizer.py"},
    "tqdm": {"engine.py", "models/checkpoint.py"},
}
"""Third-party package -> the only files that import it. torch may be used wherever there are tensors."""


def _module(path: Path) -> str:
    """`models/llama.py` -> models.llama; `miniserve/__init__.py` -> face."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__") or "face"


def _room(module: str) -> str:
    """The room a module belongs to: itself if it has a line of its own, else its folder."""
    return module if module in ROOMS else module.partition(".")[0]


def _runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those that only a type checker sees."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)):
            yield node
            yield from _runtime_nodes(node)


def _imports(path: Path) -> set[str]:
    """Names of the modules that a file imports, wherever in it; `from miniserve import batch` is miniserve.batch."""
    names: set[str] = set()
    for node in _runtime_nodes(TREES[path]):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are written out in full"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = {name for name in inner if _is_own_module(name)}
            names |= modules or {str(node.module)}
    return names


def _is_own_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return name.startswith("miniserve.") and (path.with_suffix(".py").is_file() or (path / "__init__.py").is_file())


IMPORTS = {path: _imports(path) for path in FILES}


def _own(path: Path) -> set[str]:
    """The package's own modules that a file imports."""
    names = {name for name in IMPORTS[path] if name.split(".")[0] == "miniserve"}
    return {name.removeprefix("miniserve").lstrip(".") or "face" for name in names} - {_module(path)}


def _foreign(path: Path) -> set[str]:
    """The packages that a file imports and that neither Python nor miniserve brings."""
    tops = {name.split(".")[0] for name in IMPORTS[path]}
    return tops - set(sys.stdlib_module_names) - {"miniserve"}


def _name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


# ---------------------------------------------------------------- imports


def test_every_module_has_a_room() -> None:
    assert {_module(path) for path in FILES if _room(_module(path)) not in ROOMS} == set()


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_rooms_import_only_what_lies_below(path: Path) -> None:
    room = _room(_module(path))
    targets = {_room(name) for name in _own(path)} - {room}
    assert targets <= ROOMS[room], f"{_name(path)} must not import {sorted(targets - ROOMS[room])}"


def test_the_rooms_form_no_ring() -> None:
    """Neither as drawn nor as written."""
    _assert_acyclic(ROOMS)
    _assert_acyclic({_module(path): _own(path) for path in FILES})


def _assert_acyclic(graph: dict[str, set[str]]) -> None:
    left = {name: {target for target in targets if target in graph} for name, targets in graph.items()}
    while left:
        done = {name for name, targets in left.items() if not targets & left.keys()}
        assert done, f"these import each other: {sorted(left)}"
        left = {name: targets for name, targets in left.items() if name not in done}


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_pure_rooms_need_the_standard_library_only(path: Path) -> None:
    if _room(_module(path)) in PURE:
        assert _foreign(path) == set()
        assert {_room(name) for name in _own(path)} <= PURE


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_a_third_party_package_has_one_home(path: Path) -> None:
    for package in _foreign(path) - {"torch"}:
        assert package in HOMES, f"{package} is new: give it a home"
        assert _name(path) in HOMES[package], f"{package} lives in {sorted(HOMES[package])}"


def test_what_is_imported_is_declared() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    lists = re.findall(r"^(?:dependencies|flash-attn) = \[(.*?)\]$", text, re.MULTILINE | re.DOTALL)
    declared = {
        re.split(r"[<>=\[ ]", name)[0].replace("-", "_") for block in lists for name in re.findall(r'"(.*?)"', block)
    }
    assert set().union(*map(_foreign, FILES)) <= declared


# ---------------------------------------------------------------- no hidden state

MUTATORS = {"append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "remove", "discard", "clear"}
AMBIENT = {"ContextVar", "local", "lru_cache", "cache"}


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_no_module_keeps_state(path: Path) -> None:
    """No `global`, no container at module level that somebody changes, no ambient context, no endless cache."""
    tree = TREES[path]
    names = {name for node in tree.body for name in _assigned(node)}
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Global), f"line {node.lineno}: global"
        changed = _changed_name(node)
        assert changed not in names, f"line {node.lineno}: {changed} is module state"
        if isinstance(node, (ast.Name, ast.Attribute)):
            assert (node.id if isinstance(node, ast.Name) else node.attr) not in AMBIENT, f"line {node.lineno}"


def _assigned(node: ast.stmt) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _changed_name(node: ast.AST) -> str | None:
    """`X` for X.append(...), X[...] = ..., del X[...], X.field = ..."""
    owner: ast.AST | None = None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
        owner = node.func.value
    elif isinstance(node, (ast.Subscript, ast.Attribute)) and isinstance(node.ctx, (ast.Store, ast.Del)):
        owner = node.value
    return owner.id if isinstance(owner, ast.Name) else None


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_no_assert_in_the_package(path: Path) -> None:
    """A3: under `python -O` an assert is gone."""
    lines = [n.lineno for n in ast.walk(TREES[path]) if isinstance(n, ast.Assert)]
    assert lines == []


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_nothing_unpickles_or_evaluates(path: Path) -> None:
    """A1, A2, G10: no code out of files or sockets, and remote code is switched on nowhere."""
    tree = TREES[path]
    assert not {name.split(".")[0] for name in IMPORTS[path]} & {"pickle", "marshal", "shelve", "dill", "joblib"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in {"eval", "exec", "compile", "__import__"}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            assert ast.unparse(node.func) not in {"torch.load", "os.system", "os.popen"}
        if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
            assert isinstance(node.value, ast.Constant) and node.value.value is False


# ---------------------------------------------------------------- seen from outside


def _python(code: str, *arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_miniserve_is_cheap() -> None:
    """The face, the errors and the settings come without torch, transformers or a web server."""
    loaded = _python(
        "import sys, miniserve\n"
        "miniserve.SamplingParams(), miniserve.EngineConfig('x'), miniserve.RequestOutput, miniserve.MiniserveError\n"
        "print(*sorted({name.split('.')[0] for name in sys.modules}))"
    ).split()
    assert "miniserve" in loaded
    assert not {"torch", "numpy", *HOMES} & set(loaded)


def test_the_pure_rooms_run_where_nothing_is_installed() -> None:
    modules = [f"miniserve.{_module(path)}" for path in FILES if _room(_module(path)) in PURE]
    code = (
        "import sys, importlib\n"
        f"sys.modules.update(dict.fromkeys({['torch', 'numpy', *HOMES]!r}))\n"
        f"for name in {modules!r}: importlib.import_module(name)"
    )
    _python(code)


def test_the_engine_runs_without_flash_attn_cuda_compiler_or_web_server(tmp_path: Path) -> None:
    """Two engines in one process; none of the optional packages can be imported, and no compiler is found."""
    folder = write_llama(tmp_path, num_layers=2, reads=(0, 0), eos_token_id=2)
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(['flash_attn', 'fastapi', 'uvicorn', 'starlette', 'sse_starlette']))\n"
        "from miniserve import Engine, SamplingParams\n"
        "a, b = (Engine(sys.argv[1], device='cpu', max_model_len=32, block_size=size) for size in (4, 16))\n"
        "p = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)\n"
        "one, two = (e.generate([[5, 6, 7]], p)[0].outputs[0].token_ids for e in (a, b))\n"
        "assert one == two and len(one) == 5 and a.block_manager is not b.block_manager\n"
        "assert 'transformers' not in sys.modules, 'no text, no tokenizer, no import'\n"
    )
    _python(code, str(folder), PATH="", CXX="", MINISERVE_CACHE=str(tmp_path))


def test_an_unknown_name_of_the_face_is_an_attribute_error() -> None:
    import miniserve

    assert set(miniserve.__all__) <= {*dir(miniserve), "Engine", "AsyncEngine"}
    for name in miniserve.__all__:
        assert getattr(miniserve, name) is not None
    with pytest.raises(AttributeError, match="Motor"):
        _ = miniserve.Motor
