"""A comparison with some of a model's repeated blocks, where one with the complete model does not fit.

Blocks are the entries of a container whose parameters have equal names and shapes: the layers of a transformer. Each
stage keeps its first blocks, and those in which it is cut; the others are left out where the model is built. The model
is captured without them, and cut like the plan, so that a comparison covers all that the stages do but these blocks.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from autopipe.commands.checking.fitting import Need, Place, place_of
from autopipe.commands.prepared import Prepared
from autopipe.errors import AutopipeError, RunError
from autopipe.generate import generate
from autopipe.ir.graph import Graph
from autopipe.ir.plan import Plan
from autopipe.measure.on_device import described_on
from autopipe.planning import map_cuts_to
from autopipe.runtime.batches.members import of_same_team
from autopipe.trace import capture
from autopipe.workload import Workload

# the estimate for a part of a model is rough, and the ranks may train beside its comparison
_RESERVE = 1.5


def repeated_blocks(graph: Graph) -> list[list[str]]:
    """Return the paths of the blocks, a list for each container; a block inside another one is not among them."""
    contents: dict[str, set[tuple[object, ...]]] = defaultdict(set)
    for name, spec in graph.parameters.items():
        parts = name.split(".")
        for end in (index + 1 for index, part in enumerate(parts) if part.isdigit()):
            contents[".".join(parts[:end])].add((".".join(parts[end:]), tuple(spec.shape), spec.dtype))
    alike: dict[tuple[str, frozenset[tuple[object, ...]]], list[str]] = defaultdict(list)
    for path, content in contents.items():
        alike[path.rpartition(".")[0], frozenset(content)].append(path)
    groups = [paths for paths in alike.values() if len(paths) > 1]
    inside = tuple(f"{path}." for paths in groups for path in paths)
    return [paths for paths in groups if not paths[0].startswith(inside)]


def left_out(plan: Plan, graph: Graph, most: int) -> tuple[str, ...]:
    """Return the blocks to leave out if each stage keeps ``most`` of those that it has alone, of each container."""
    stages: dict[str, set[int]] = {path: set() for paths in repeated_blocks(graph) for path in paths}
    for stage in plan.stages:
        for node in graph.nodes[stage.start : stage.stop]:
            parts = node.module_path.split(".")
            for path in {".".join(parts[: end + 1]) for end in range(len(parts))} & stages.keys():
                stages[path].add(stage.index)
    own: dict[tuple[str, int], list[str]] = defaultdict(list)
    for path, indices in stages.items():
        if len(indices) == 1:
            own[path.rpartition(".")[0], min(indices)].append(path)
    return tuple(path for paths in own.values() for path in paths[most:])


def fitting_blocks(prepared: Prepared, need: Need) -> tuple[tuple[str, ...], Place]:
    """Return the fewest blocks to leave out so that a comparison fits, and where; () if that is not possible.

    ``need``: of a comparison with the complete model.
    """
    graph, place = prepared.graph, Place("", 1)
    if graph.varies:  # its Python would run otherwise
        return (), place
    sizes = {name: spec.num_bytes({}) for name, spec in graph.parameters.items()}
    deepest = max(map(len, repeated_blocks(graph)), default=0)
    for most in range(deepest - 1, 0, -1):
        paths = left_out(prepared.plan, graph, most)
        without = tuple(f"{path}." for path in paths)
        share = sum(size for name, size in sizes.items() if not name.startswith(without)) / sum(sizes.values())
        part = dataclasses.replace(
            need,
            device_bytes=round(need.device_bytes * share * _RESERVE),
            host_bytes=round(need.host_bytes * share * _RESERVE),
            flops=need.flops * share,
        )
        place = place_of(prepared, part)
        if paths and place.device:
            return paths, place
    return (), place


@contextmanager
def without_blocks(prepared: Prepared, paths: tuple[str, ...]) -> Iterator[Prepared]:
    """Yield the run without these blocks; its stages are in a temporary folder.

    Raises: RunError if the model cannot be built, captured or cut without them.
    """
    plan, graph, batches = prepared.plan, prepared.graph, prepared.workload.batches
    spec, kind = dataclasses.replace(plan.workload, left_out=paths), prepared.profile.device.kind
    with TemporaryDirectory(prefix="autopipe-blocks-") as scratch:
        try:
            workload = Workload.from_spec(spec)
            workload.batches.minibatch = batches.minibatch
            captured = capture(
                workload,
                allow_data_dependent=prepared.allow_data_dependent,
                verify=kind == "cpu",
                lengths=len(graph.symbols) > 1,
            )
            captured = of_same_team(described_on(kind, captured, workload), plan, prepared.stages, workload)
            cut = map_cuts_to(plan, graph, captured.graph, all_connected=True)
            cut = dataclasses.replace(_without_lost_state(cut, captured.graph), workload=spec)
            generate(captured, cut, Path(scratch))
        except Exception as error:
            # of the user's code, too, which may count on all blocks
            text = error.what if isinstance(error, AutopipeError) else f"{type(error).__name__}: {error}"
            raise RunError(f"the model does not work without some of its blocks ({text})") from error
        yield dataclasses.replace(
            prepared, workload=workload, graph=captured.graph, plan=cut, stages=Path(scratch), placeholders=None
        )


def _without_lost_state(plan: Plan, graph: Graph) -> Plan:
    """Return the plan without the parameters and buffers that its graph does not have."""
    stages = tuple(
        dataclasses.replace(
            stage,
            parameters=tuple(name for name in stage.parameters if name in graph.parameters),
            buffers=tuple(name for name in stage.buffers if name in graph.buffers),
        )
        for stage in plan.stages
    )
    return dataclasses.replace(plan, stages=stages, ties=tuple(t for t in plan.ties if t.parameter in graph.parameters))


def described(graph: Graph, paths: tuple[str, ...]) -> str:
    """Return how many blocks are compared: ``6 of 48 blocks``."""
    total = sum(map(len, repeated_blocks(graph)))
    return f"{total - len(paths)} of {total} blocks"
