"""Reader of PipeDream's and DAPPLE's profile files (``graph.txt``).

::

    node12 -- Conv2d(128, 256, ...) -- forward_compute_time=10.814, backward_compute_time=18.335,
                                       activation_size=411041792.000, parameter_size=1180672.000[ -- stage_id=K]
    <TAB>node5 -- node6

There is one node or edge per line, in any order. Times are in milliseconds per minibatch, and sizes in bytes. Several
outputs are written as ``[a; b; c]``; their sizes are added. Some files indent edges with spaces, so an edge is
recognized by its two fields. As in PipeDream, sources named ``Input`` and sinks named ``__getitem__`` are dropped,
because they compute nothing.

Source: msr-fiddle/pipedream, ``graph/graph.py``; AlibabaPAI/DAPPLE, ``profiling_results``.
"""

from __future__ import annotations

import graphlib
import re
from dataclasses import dataclass
from pathlib import Path

from autopipe.errors import PlanError

USUAL = re.compile(
    r"forward_compute_time=([\d.]+), backward_compute_time=([\d.]+), activation_size=([\d.]+), parameter_size=([\d.]+)"
)
FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_REMEDY = "give one of PipeDream's graph.txt files"
_MOST_MILLISECONDS = 1e12  # of one layer: 30 years
_MOST_BYTES = 1e15


@dataclass(frozen=True, slots=True)
class LayerGraph:
    """A DAG of layers. Seconds and bytes are per minibatch; a layer is identified by its index."""

    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    activation_bytes: tuple[float, ...]
    parameter_bytes: tuple[float, ...]
    edges: tuple[tuple[int, int], ...]  # (from, to)


def read_pipedream(path: Path) -> LayerGraph:
    """Return the graph of a profile file. Raises: PlanError with file and line if it violates the format."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{path.name} cannot be read: {error}", where=str(path), remedy=_REMEDY) from None
    return parse_pipedream(text, str(path))


def parse_pipedream(text: str, where: str = "profile") -> LayerGraph:
    """Return the graph of a profile's text; see ``read_pipedream``."""
    names: list[str] = []
    rows: list[tuple[str, float, float, float, float]] = []
    place: dict[str, int] = {}
    links: list[tuple[str, str, int]] = []
    for number, line in enumerate(text.splitlines(), 1):
        fields = line.strip().split(" -- ")
        if len(fields) == 2:
            links.append((fields[0], fields[1], number))
        elif len(fields) > 2:
            if fields[0] in place:
                raise PlanError(f"node {fields[0]!r} is listed twice", where=f"{where}:{number}", remedy=_REMEDY)
            place[fields[0]] = len(names)
            names.append(fields[0])
            rows.append((fields[1], *_costs(fields[2], f"{where}:{number}")))
        elif fields[0]:
            raise PlanError(
                f"neither a node nor an edge: {line.strip()[:60]!r}", where=f"{where}:{number}", remedy=_REMEDY
            )
    if not names:
        raise PlanError("the profile has no nodes", where=where, remedy=_REMEDY)
    edges = []
    for a, b, number in links:
        if a not in place or b not in place:
            missing = a if a not in place else b
            raise PlanError(
                f"an edge names {missing!r}, which is not a node", where=f"{where}:{number}", remedy=_REMEDY
            )
        edges.append((place[a], place[b]))
    return _cleaned(names, rows, edges, where)


def _costs(metadata: str, where: str) -> tuple[float, float, float, float]:
    usual = USUAL.fullmatch(metadata)
    if usual:
        try:
            a, b, c, d = map(float, usual.groups())
        except ValueError:
            pass  # "1.2.3": the general path below reports it
        else:
            if max(a, b) <= _MOST_MILLISECONDS and max(c, d) <= _MOST_BYTES:
                return a / 1000, b / 1000, c, d
    values = dict(entry.split("=", 1) for entry in metadata.split(", ") if "=" in entry)
    try:
        forward, backward = float(values[FIELDS[0]]), float(values[FIELDS[1]])
        activation = values[FIELDS[2]]
        if activation[:1] == "[":
            size = sum(float(part) for part in activation.strip("[]").split(";"))
        else:
            size = float(activation)
        parameters = float(values[FIELDS[3]])
    except KeyError as error:
        raise PlanError(f"{error.args[0]} is missing", where=where, remedy=_REMEDY) from None
    except ValueError as error:
        raise PlanError(f"not a number: {error}", where=where, remedy=_REMEDY) from None
    times, sizes = (forward, backward), (size, parameters)
    known = all(0 <= value <= _MOST_MILLISECONDS for value in times) and all(0 <= v <= _MOST_BYTES for v in sizes)
    if not known:
        raise PlanError("a time or size is negative or too large", where=where, remedy=_REMEDY)
    return forward / 1000, backward / 1000, size, parameters


def _cleaned(
    names: list[str], rows: list[tuple[str, float, float, float, float]], edges: list[tuple[int, int]], where: str
) -> LayerGraph:
    has_source = {b for _, b in edges}
    gone = {i for i, row in enumerate(rows) if i not in has_source and row[0].startswith("Input")}
    feeds = {a for a, b in edges if b not in gone}
    gone |= {i for i, row in enumerate(rows) if i not in feeds and row[0].startswith("__getitem__")}
    kept = [index for index in range(len(names)) if index not in gone]
    if not kept:
        raise PlanError("the profile has only inputs", where=where, remedy=_REMEDY)
    place = {index: new for new, index in enumerate(kept)}
    descriptions, forward, backward, activations, parameters = zip(*(rows[index] for index in kept), strict=True)
    sorter: graphlib.TopologicalSorter[int] = graphlib.TopologicalSorter()
    for a, b in edges:
        sorter.add(b, a)
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        first = names[min(error.args[1])]
        raise PlanError(f"the profile's graph has a cycle through {first!r}", where=where, remedy=_REMEDY) from None
    # repeated edges count once
    unique = dict.fromkeys((place[a], place[b]) for a, b in edges if a in place and b in place)
    kept_names = tuple(names[index] for index in kept)
    return LayerGraph(kept_names, descriptions, forward, backward, activations, parameters, tuple(unique))
