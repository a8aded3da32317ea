"""Names of stages and cuts by modules of the model: ``tok_emb, blocks.0 to blocks.2``; ``inside blocks.3, before mlp``.

A stage is named by the outermost modules that are completely in it. A *block* is a module with a number, such as
``blocks.3``; if it is in several stages, each of them names it as ``part of``. Modules without parameters are omitted
if there are others. ``input_only`` calls, which every stage can make, are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from autopipe.ir.graph import Graph

_MOST_NAMES = 4  # of one stage; with more, only the first and the last are named


@dataclass(slots=True)
class _Named:
    """A module of a stage."""

    path: str
    trained: bool = False  # it has parameters
    part: bool = False  # only a part of it is in the stage
    weak: bool = False  # a container of which the stage has no submodule, only a call such as an addition
    within: list[str] = field(default_factory=list)  # the submodules of the block that are in the stage, if ``part``

    @property
    def text(self) -> str:
        return f"part of {called(self.path)}" if self.part else called(self.path)


def stage_modules(graph: Graph, start: int, stop: int) -> str:
    """Return the names of the modules whose calls are ``graph.nodes[start:stop]``, or "" if no call is in a module."""
    named: dict[tuple[str, bool], _Named] = {}
    for node in graph.nodes[start:stop]:
        if node.input_only or not node.module_path:
            continue
        entry, within = _name(graph, node.module_path, start, stop)
        entry = named.setdefault((entry.path, entry.part), entry)
        entry.trained = entry.trained or bool(node.parameters)
        if within and within not in entry.within:
            entry.within.append(within)
    strong = [entry for entry in named.values() if not entry.weak] or list(named.values())
    if not strong:
        return ""
    if len(strong) == 1 and strong[0].part and strong[0].within:
        return f"{strong[0].text} ({_shortened([[name] for name in strong[0].within])})"
    runs = list(_runs(strong))
    trained = [run for run in runs if any(entry.trained for entry in run)] or runs
    return _shortened([[entry.text for entry in run] for run in trained])


def cut_place(graph: Graph, position: int) -> str:
    """Return where the cut before ``graph.nodes[position]`` is: before a module, inside a block, or before a call."""
    node = next((node for node in graph.nodes[position:] if not node.input_only), graph.nodes[position])
    first, spans = graph.position[node.name], graph.module_spans
    around = list(_ancestors(node.module_path))
    begun = [path for path in around if spans.get(path, (first, first))[0] < first]
    block = next((path for path in reversed(begun) if _is_block(path)), "")
    if len(begun) < len(around):
        begins = around[len(begun) :]
        name = next((path for path in begins if _is_block(path) and path in graph.containers), begins[0])
        if block:
            return f"inside {called(block)}, before {name.removeprefix(f'{block}.')}"
        return f"before {called(name)}"
    inside = f"inside {called(node.module_path)}, " if node.module_path else ""
    return f"{inside}before {node.name}" + (f" ({node.place})" if node.place else "")


def _name(graph: Graph, path: str, start: int, stop: int) -> tuple[_Named, str]:
    """Return the module to report for a call in ``nodes[start:stop]``.

    If it is a block of which the stage has only a part, also return the submodule that contains the call; else "".
    """
    spans, around = graph.module_spans, list(_ancestors(path))
    whole = next((entry for entry in around if start <= spans[entry][0] and spans[entry][1] < stop), "")
    blocks = [entry for entry in around if _is_block(entry) and len(entry) < len(whole or f"{path}.")]
    if whole and (not blocks or (_is_block(whole) and whole in graph.containers)):
        return _Named(whole), ""
    if blocks:
        return _Named(blocks[-1], part=True), whole.removeprefix(f"{blocks[-1]}.")
    return _Named(path, part=True, weak=path in graph.containers), ""


def _ancestors(path: str) -> Iterator[str]:
    """Yield the paths of the modules around a call, outermost first, the call's own module last."""
    parts = path.split(".") if path else []
    for count in range(1, len(parts) + 1):
        yield ".".join(parts[:count])


def _is_block(path: str) -> bool:
    return path.rpartition(".")[2].isdecimal()


def called(path: str) -> str:
    """Return the name of a module for text. In a model that is a ``Sequential``, the path is only a number."""
    return f"module {path}" if path[:1].isdecimal() else path


def _runs(names: Sequence[_Named]) -> Iterator[list[_Named]]:
    """Yield the names, with consecutive blocks grouped."""
    run: list[_Named] = []
    for entry in names:
        if run and not _follows(run[-1], entry):
            yield run
            run = []
        run.append(entry)
    yield run


def _follows(one: _Named, other: _Named) -> bool:
    (list_, _, number), (other_list, _, next_number) = one.path.rpartition("."), other.path.rpartition(".")
    blocks = number.isdecimal() and next_number.isdecimal() and not one.part and not other.part
    return blocks and list_ == other_list and int(next_number) == int(number) + 1


def _shortened(runs: Sequence[Sequence[str]]) -> str:
    if len(runs) > _MOST_NAMES:
        return f"{runs[0][0]} to {runs[-1][-1]}"
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)
