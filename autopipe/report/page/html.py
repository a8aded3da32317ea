"""A page as one HTML file: template, style, scripts and data, without references to anything outside."""

from __future__ import annotations

import functools
import json
from importlib import resources
from importlib.resources.abc import Traversable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from markupsafe import Markup

    from autopipe.report.page.content import Page

ECHARTS = "vendor/echarts.min.js"
SCRIPTS = ("core.js", "zoom.js", "gantt.js", "model.js", "charts.js", "main.js")


def render(page: Page) -> str:
    """Return the HTML text. Everything in ``page`` is escaped."""
    from jinja2 import BaseLoader, Environment, StrictUndefined

    environment = Environment(
        loader=BaseLoader(), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(_asset("page.html")).render(
        page=page,
        data=_json(page.data),
        style=_trusted("page.css"),
        echarts=_trusted(ECHARTS),
        scripts=[_trusted(name) for name in SCRIPTS],
    )


def _assets() -> Traversable:
    return resources.files("autopipe.report.page") / "assets"


@functools.cache
def _asset(name: str) -> str:
    return _assets().joinpath(*name.split("/")).read_text(encoding="utf-8")


def _trusted(name: str) -> Markup:
    """Return a file of this package, which is not escaped."""
    from markupsafe import Markup

    return Markup(_asset(name))  # noqa: S704 - our own file


def _json(value: Any) -> Markup:
    """Return JSON that can be in a script element, whatever the names in it are."""
    from jinja2.utils import htmlsafe_json_dumps

    return htmlsafe_json_dumps(value, dumps=json.dumps, separators=(",", ":"), allow_nan=False)
