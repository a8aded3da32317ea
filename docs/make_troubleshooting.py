"""Write docs/troubleshooting.md: messages as the source raises them, each with its meaning and a fix.

docs/troubleshooting.toml holds meaning and fix, and names a message by fragments that it contains. The text on the page
is the text of the source, so the two cannot differ. Fragments that match no message, or several, are an error. With
``--check`` the page is compared and not written. ``--missing FOLDER...`` lists the errors of these folders that have no
entry.
"""

from __future__ import annotations

import ast
import itertools
import re
import sys
import textwrap
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

from generated import write_or_compare

DOCS = Path(__file__).resolve().parent
PAGE, ENTRIES = DOCS / "troubleshooting.md", DOCS / "troubleshooting.toml"
SOURCES = ("autopipe", "cli")
WIDTH = 120
HEAD = """# Troubleshooting

Written by `make docs` from the messages in the source and from `docs/troubleshooting.toml`.

Every error has three parts: what is wrong, `at:` where, and `try:` what helps. `...` stands for names
and numbers. `--debug` adds the traceback, `-v` shows more of what autopipe does, and `autopipe doctor` describes the
machine. Exit codes: 1 an error of the input, 2 usage, 3 a rank failed, 75 stopped with a checkpoint, 130 Ctrl-C.
"""


def messages(source: str) -> Iterator[str]:
    """Yield every string of a Python source, with ``...`` for what is filled in."""
    tree = ast.parse(source)
    formatted = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    parts = {id(value) for node in formatted for value in node.values}
    for node in formatted:
        yield re.sub(r"(\.\.\.)+", "...", "".join(_part(value) for value in node.values))
    for constant in ast.walk(tree):
        if isinstance(constant, ast.Constant) and isinstance(constant.value, str) and id(constant) not in parts:
            yield constant.value


def _part(value: ast.expr) -> str:
    return str(value.value) if isinstance(value, ast.Constant) else "..."


def all_messages(root: Path) -> list[str]:
    """Return the messages of every source file, each once, without the docstrings of whole files and definitions."""
    texts: dict[str, None] = {}
    for folder in SOURCES:
        for path in sorted((root / folder).rglob("*.py")):
            texts.update(dict.fromkeys(text for text in messages(path.read_text(encoding="utf-8")) if "\n" not in text))
    return list(texts)


def message_of(fragments: Sequence[str], texts: Sequence[str]) -> str:
    """Return the message that contains all of the fragments. Raises: LookupError unless there is exactly one.

    A single fragment may be the complete message.
    """
    if len(fragments) == 1 and fragments[0] in texts:
        return fragments[0]
    matches = [text for text in texts if all(fragment in text for fragment in fragments)]
    if len(matches) != 1:
        raise LookupError(f"{' ... '.join(fragments)!r}: {len(matches)} messages match: {matches[:3]}")
    return matches[0]


def missing(folders: Sequence[Path]) -> Iterator[str]:
    """Yield ``path:line: message`` for every error that the folders raise and no entry has."""
    document = tomllib.loads(ENTRIES.read_text(encoding="utf-8"))
    known = [entry["message"] for section in document["section"] for entry in section["entry"]]
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = getattr(node.func, "id", "") if isinstance(node, ast.Call) else ""
            if not isinstance(node, ast.Call) or not node.args or not name.endswith(("Error", "refused", "refuse")):
                continue
            for text in itertools.islice(messages(ast.unparse(node.args[0])), 1):
                if not any(all(fragment in text for fragment in fragments) for fragments in known):
                    yield f"{path}:{node.lineno}: {text}"


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def page(root: Path) -> str:
    """Return the text of the page. Raises: LookupError naming the entries that match no message, or several."""
    texts = all_messages(root)
    document = tomllib.loads(ENTRIES.read_text(encoding="utf-8"))
    blocks, failures = [HEAD], []
    for section in document["section"]:
        blocks.append(f"## {section['title']}\n")
        if "text" in section:
            blocks.append(f"{section['text'].strip()}\n")
        for entry in section["entry"]:
            try:
                message = message_of(entry["message"], texts)
            except LookupError as error:
                failures.append(str(error))
                continue
            blocks.append(f"```text\n{message}\n```\n")
            blocks += [f"{_wrapped(text)}\n" for text in (entry["meaning"], f"*Fix:* {entry['fix']}")]
    if failures:
        raise LookupError(f"{ENTRIES.name}: no single message for\n" + "\n".join(failures))
    return "\n".join(blocks)


def main() -> int:
    """Write the page, or compare it; return the exit code."""
    if "--missing" in sys.argv[1:]:
        print("\n".join(missing([Path(name) for name in sys.argv[sys.argv.index("--missing") + 1 :]])))
        return 0
    return write_or_compare({PAGE: page(DOCS.parent)})


if __name__ == "__main__":
    sys.exit(main())
