"""The pages, executed: snippets print what stands below them, paths exist, words are defined, the core is small.

The ```python blocks of a page run in order in one namespace, from the root of the repository; a ```text block
right below one is what it must print. In README.md only a block after the comment `<!-- test -->` runs;
`path/to/model` there is a golden model with a tokenizer.
"""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_tokenizers

import miniserve.models
from miniserve.kvcache.sharing import KVSharing
from miniserve.report import draw_map

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
# fmt: off
WORDS = (
    # architecture's table
    "KVSharing", "owner", "reader", "layer group", "retention class", "block", "block_size", "block_table", "slot",
    "slot_mapping", "cu_seqlens_q", "max_seqlen_q", "seqused_k", "max_seqlen_k", "Request", "num_tokens",
    "num_computed_tokens", "num_scheduled_tokens", "token budget", "ForwardBatch", "BlockManager", "KVPool", "cut",
    # the shape alphabet
    "T", "S", "H", "Hq", "Hkv", "D", "L", "G", "N", "P", "V",
    # the field
    "page", "arena", "window", "chunked prefill", "continuous batching", "preemption by recompute", "prefix cache",
    "cache salt", "ragged batch", "MHA", "MQA", "GQA", "MLA", "CLA", "MLKV", "LCKV", "YOCO",
)
# fmt: on
PATH = re.compile(r"`((?:miniserve|docs|tests|examples|recipes|scripts|benchmarks)/[\w./-]*)`")
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")
SNIPPET = re.compile(r"^(<!-- test -->\n)?```python\n(.*?)^```\n(?:\n```text\n(.*?)^```$)?", re.M | re.S)
DRAWING = re.compile(r"^ *layer +0 .*\n(?: *group +\d+ .*\n)+", re.M)


@pytest.fixture
def model(goldens, tmp_path):
    """A golden model that understands text."""
    shutil.copytree(goldens / "mlkv-neox-4x2", tmp_path / "model")
    return tiny_tokenizers.write_byte_level(tmp_path / "model")


@pytest.fixture
def at_root(monkeypatch):
    """Where a reader stands; what a page adds to the import paths goes with it."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(miniserve.models, "__path__", [*miniserve.models.__path__])


@pytest.mark.parametrize("name", ["docs/walkthrough.md", "docs/adding-a-model.md", "docs/models.md", "README.md"])
def test_snippets_print_what_the_page_says(name, model, at_root):
    text = (ROOT / name).read_text(encoding="utf-8").replace("path/to/model", str(model))
    found = [m for m in SNIPPET.finditer(text) if m[1] or name != "README.md"]
    assert found, f"{name} has no snippet that is tested"
    namespace = {"__name__": name}
    for match in found:
        first_line = text.count("\n", 0, match.start(2))
        code = compile("\n" * first_line + match[2], name, "exec", dont_inherit=True)  # errors name the page's lines
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, namespace)
        if match[3] is not None:
            assert printed.getvalue().strip() == match[3].strip(), f"{name}, below the snippet of line {first_line}"


def test_paths_and_links_exist():
    missing = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        named = [ROOT / path for path in PATH.findall(text)] + [page.parent / path for path in LINK.findall(text)]
        missing += [f"{page.name}: {path}" for path in named if not path.exists()]
    assert not missing


def test_lines_are_at_most_120_wide():
    long = [
        f"{page.name}:{number}"
        for page in PAGES
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1)
        if len(line) > 120
    ]
    assert not long


@pytest.mark.parametrize("name", ["README.md", "docs/walkthrough.md", "miniserve/kvcache/sharing.py"])
def test_drawings_are_what_the_engine_draws(name):
    drawings = [match[0] for match in DRAWING.finditer((ROOT / name).read_text(encoding="utf-8"))]
    assert drawings
    for drawing in drawings:
        rows = [line.split() for line in drawing.splitlines()]
        expected = [line.split() for line in draw_map(sharing_in(rows)).splitlines()]
        assert [row[: len(cells)] for row, cells in zip(rows, expected)] == expected  # a legend may follow


def sharing_in(rows):
    """The map that a drawing shows; how large its windows are it does not say."""
    num_layers = sum(cell.isdecimal() for cell in rows[0])
    owners, windows = [None] * num_layers, [None] * num_layers
    for row in rows[1:]:
        cells = row[2 : 2 + num_layers]
        owner = next(layer for layer, cell in enumerate(cells) if cell in "■◧")
        for layer, cell in enumerate(cells):
            if cell != "·":
                owners[layer], windows[layer] = owner, 8 if cell in "◧○" else None
    return KVSharing(tuple(owners), tuple(windows))


def test_the_glossary_defines_each_word_once():
    entries = re.findall(r"^- (\*\*.+?):", (ROOT / "docs/glossary.md").read_text(encoding="utf-8"), re.M)
    defined = [word.strip("`") for head in entries for word in re.findall(r"\*\*(.+?)\*\*", head)]
    assert sorted(set(WORDS) - set(defined)) == []
    assert sorted(word for word in set(defined) if defined.count(word) > 1) == []


def test_the_core_is_small_enough_for_one_evening():
    result = subprocess.run([sys.executable, ROOT / "scripts/lines.py"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "core" in result.stdout


def test_a_core_that_grows_too_large_is_an_error(capsys):
    assert runpy.run_path(str(ROOT / "scripts/lines.py"))["main"](limit=10) == 1
    assert "lines over its limit" in capsys.readouterr().err
