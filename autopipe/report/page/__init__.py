"""``autopipe report``: a plan or a run as one HTML file that needs no network.

``timelines`` and ``modules`` turn a ``Timeline`` and a ``Graph`` into columns of whole numbers, ``curves`` the metrics,
``content`` all parts of a page into one JSON value and tables, and ``html`` writes them, with the scripts of
``assets/``, into one file. ECharts (``assets/vendor``) draws.
"""

from __future__ import annotations

from autopipe.report.page.content import Page, Subject, page_of
from autopipe.report.page.html import render

__all__ = ["Page", "Subject", "page_of", "render"]
