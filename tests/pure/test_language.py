"""Plain technical English: names say what they hold, and no phrase reads as translated."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = "autopipe", "cli", "tests", "benchmarks", "docs", "sample_models"
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("README.md")])
BANNED_NAMES = {"found", "made", "said", "told", "held"}
BANNED_PHRASES = re.compile(
    r"\b(?:is|are) none\b|(?<!there )\bis no (?!longer\b|more\b|less\b|faster\b|slower\b|better\b)[a-z]"
    r"|\b(?:is|are|was|were|be) told\b|\banew\b|\bfor people\b|\bwhoever\b|\bnobody\b"
    r"|\bfor ever\b|\beverybody\b|\bsomebody\b|\bfor good\b"
)


def names_bound(tree: ast.AST) -> list[tuple[int, str]]:
    """Return every name that is assigned, defined or a parameter, with its line."""
    names = [(n.lineno, n.id) for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    names += [(n.lineno, n.arg) for n in ast.walk(tree) if isinstance(n, ast.arg)]
    names += [(n.lineno, n.name) for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    return names


def words_of(text: str) -> list[tuple[int, str]]:
    """Return the comments and strings of a file, with their lines."""
    parts = []
    kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in kinds:
            parts.append((token.start[0], token.string))
    return parts


def phrases_in(text: str) -> list[str]:
    """Return the banned phrases of a text, with the words around them; quoted code is not prose."""
    prose = re.sub(r"``[^`]*``|`[^`]*`", "CODE", text)
    flat = re.sub(r"\s+", " ", prose)
    return [flat[max(0, m.start() - 30) : m.end() + 20] for m in BANNED_PHRASES.finditer(flat)]


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_name_says_what_it_holds(folder):
    wrong = {}
    for path in FILES:
        if path.relative_to(ROOT).parts[0] == folder:
            names = names_bound(ast.parse(path.read_text(encoding="utf-8")))
            bad = sorted({f"{line}: {name}" for line, name in names if name.strip("_") in BANNED_NAMES})
            if bad:
                wrong[str(path.relative_to(ROOT))] = bad
    assert wrong == {}


@pytest.mark.parametrize("folder", FOLDERS)
def test_comments_and_messages_are_plain_english(folder):
    wrong = {}
    for path in FILES:
        if path.relative_to(ROOT).parts[0] == folder and path != Path(__file__).resolve():
            text = path.read_text(encoding="utf-8")
            bad = [f"{line}: {phrase}" for line, words in words_of(text) for phrase in phrases_in(words)]
            if bad:
                wrong[str(path.relative_to(ROOT))] = bad
    assert wrong == {}


def test_pages_are_plain_english():
    wrong = {
        str(path.relative_to(ROOT)): bad for path in PAGES if (bad := phrases_in(path.read_text(encoding="utf-8")))
    }
    assert wrong == {}
