"""Write files that are generated from the source, or compare them (``--check``)."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def write_or_compare(texts: Mapping[Path, str], others: Iterable[Path] = ()) -> int:
    """Write each text into its file; with ``--check``, only compare them. Returns the exit code.

    ``others``: files of the same kind that are there, which are out of date where ``texts`` does not have them.
    """
    if "--check" not in sys.argv[1:]:
        for path, text in texts.items():
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return 0
    old = [path for path, text in texts.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    old += [path for path in others if path not in texts]
    for path in old:
        print(f"{path.relative_to(ROOT)} is not what the source says; run: make docs", file=sys.stderr)
    return 1 if old else 0
