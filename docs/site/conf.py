"""The site: every page as it lies in the repository, in the order of navigation.toml. See `make docs-site`.

The source folder is the repository, so that a link that works on a host of repositories works on the site, too. Only
the front page changes during a build: the lists of the navigation are appended to it. Nothing is loaded from a network.
"""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import autopipe

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[2]
NAVIGATION = Path(__file__).with_name("navigation.toml")

project = "autopipe"
version = release = autopipe.__version__
root_doc = "README"
extensions = ["myst_parser"]
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**.md", "benchmarks/**.md"]
exclude_patterns = ["**/.*", "build", "dist", "tests", "autopipe", "cli", "sample_models"]
myst_heading_anchors = 4
html_theme = "furo"
html_title = f"autopipe {release}"
html_show_sphinx = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}


def lists() -> str:
    """Return the hidden lists of pages that the theme shows beside each page.

    An entry may be a pattern. A page that does not exist yet is left out.
    """
    parts = []
    for group in tomllib.loads(NAVIGATION.read_text(encoding="utf-8"))["group"]:
        pages: list[str] = []
        for entry in group["pages"]:
            for path in sorted(ROOT.glob(f"{entry}.md")):
                name = str(path.relative_to(ROOT).with_suffix(""))
                if name not in pages:
                    pages.append(name)
        if pages:
            parts.append("\n".join(["```{toctree}", ":hidden:", f":caption: {group['name']}", "", *pages, "```"]))
    return "\n\n".join(parts)


def append_navigation(_app: Sphinx, page: str, source: list[str]) -> None:
    """Add the navigation to the front page."""
    if page == root_doc:
        source[0] = f"{source[0]}\n{lists()}\n"


def copy_front_page(app: Sphinx, failure: Exception | None) -> None:
    """Give the front page the name that a server looks for."""
    if failure is None and app.builder.format == "html":
        shutil.copyfile(Path(app.outdir, f"{root_doc}.html"), Path(app.outdir, "index.html"))


def setup(app: Sphinx) -> None:
    """Register both changes."""
    app.connect("source-read", append_navigation)
    app.connect("build-finished", copy_front_page)
