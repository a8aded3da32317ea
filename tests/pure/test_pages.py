"""The pages: their links have targets; the generated pages and the pictures are those of the source."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WRITTEN = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PAGES = sorted([*WRITTEN, *(ROOT / "benchmarks").rglob("*.md")])
FENCE = re.compile(r"^```.*?^```$", re.M | re.S)
WIDTH = 120
EXTERNAL = re.compile(r"(?:https?://[\w-]+(?:\.[\w-]+)+(?::\d+)?(?:[/?#][^\s<>\"]*)?|mailto:\S+@\S+\.\S+)\Z")


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as hosts of repositories form them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_have_targets(page):
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        if ":" in path:
            if not EXTERNAL.match(link):
                broken.append(link)
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_prose_keeps_the_width_of_the_code(page):
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    assert [line for line in text.splitlines() if len(line) > WIDTH and not line.startswith(("|", "!["))] == []


@pytest.mark.parametrize("script", ["make_api.py", "make_troubleshooting.py", "make_pictures.py"])
def test_generated_pages_and_pictures_are_those_of_the_source(script):
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / script, "--check"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
