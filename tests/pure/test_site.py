"""The documentation site: it builds without a warning, and needs no network to be read."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# what a browser loads by itself, not the links that a reader may follow
LOADED = re.compile(
    r"<(?:script|link|img|iframe|source|video|audio|embed|object)\b[^>]*?(?:src|href|data)=\"([^\"]*)\""
)
LOADED_BY_STYLE = re.compile(r"(?:url\(\s*[\"']?|@import\s+[\"'])([^\"')]+)")
REMOTE = re.compile(r"^(?:\w+:)?//")
WITHOUT_PAGE = {"genindex.html", "search.html", "index.html"}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going"]
    command += ["-c", ROOT / "docs" / "site", "-d", folder / "doctrees", ROOT, folder / "html"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    return folder / "html"


def test_nothing_is_loaded_from_a_network(site):
    pages, styles = sorted(site.rglob("*.html")), sorted(site.rglob("*.css"))
    assert len(pages) > 20
    assert styles
    loaded = {(page.name, url) for page in pages for url in LOADED.findall(page.read_text(encoding="utf-8"))}
    loaded |= {(style.name, url) for style in styles for url in LOADED_BY_STYLE.findall(style.read_text("utf-8"))}
    assert len(loaded) > 100
    assert sorted((name, url) for name, url in loaded if REMOTE.match(url)) == []
    assert sorted(path.name for path in site.rglob("*.woff*")) == []


def test_every_link_inside_the_site_has_a_target(site):
    broken = []
    for page in sorted(site.rglob("*.html")):
        text = page.read_text(encoding="utf-8")
        for url in re.findall(r'<a\b[^>]*?href="([^"]*)"', text):
            path, _, anchor = url.partition("#")
            if ":" in path:
                continue
            target = page.parent / path if path else page
            if not target.is_file() or (anchor and f'id="{anchor}"' not in target.read_text(encoding="utf-8")):
                broken.append(f"{page.relative_to(site)}: {url}")
    assert broken == []


def test_every_page_is_in_the_navigation_and_the_search(site):
    front = (site / "index.html").read_text(encoding="utf-8")
    search = (site / "searchindex.js").read_text(encoding="utf-8")
    groups = tomllib.loads((ROOT / "docs" / "site" / "navigation.toml").read_text(encoding="utf-8"))["group"]
    for group in groups:
        exists = any(list(ROOT.glob(f"{entry}.md")) for entry in group["pages"])
        assert (f">{group['name']}</span>" in front) == exists
    for page in sorted((ROOT / "docs").rglob("*.md")):
        name = page.relative_to(ROOT).with_suffix("")
        assert f'href="{name}.html"' in front
        assert f'"{name}"' in search


def test_the_front_page_is_the_readme(site):
    assert (site / "index.html").read_bytes() == (site / "README.html").read_bytes()
    assert {path.name for path in site.glob("*.html")} - WITHOUT_PAGE == {
        "README.html",
        "CONTRIBUTING.html",
        "CHANGELOG.html",
    }
