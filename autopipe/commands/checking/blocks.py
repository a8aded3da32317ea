"""A comparison with some of a model's repeated blocks, where one with the complete model does not fit.

Blocks are the entries of a container whose parameters have equal names and shapes, and which make the same calls: the
layers of a transformer. Each stage keeps its first blocks of each kind, and those in which it is cut; the others are
left out where the model is built. The model is captured without them, and cut like the plan.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from autopipe.commands.checking.fitting import Need, Place, out_of_memory, place_of
from autopipe.commands.prepared import Prepared
from autopipe.errors import AutopipeError, RunError
from autopipe.generate import generate
from autopipe.ir.graph import Graph
from autopipe.ir.plan import Plan
from autopipe.measure.on_device import described_on
from autopipe.planning import map_cuts_to
from autopipe.runtime.batches.members import of_same_team
from autopipe.trace import capture

# the estimate for a part of a model is rough, and the ranks may train beside its comparison
_RESERVE = 1.5
# bytes of training for each byte of a weight: itself, its gradient and the state of its optimizer
_OF_A_WEIGHT = 4


class Blocks:
    """The repeated blocks of a model, and the stages of a plan that run them."""

    def __init__(self, plan: Plan, graph: Graph) -> None:
        self._graph = graph
        parameters: dict[str, set[Hashable]] = defaultdict(set)
        for name, spec in graph.parameters.items():
            parts = name.split(".")
            for end in range(1, len(parts)):
                if parts[end - 1].isdigit():
                    path = ".".join(parts[:end])
                    parameters[path].add((name.removeprefix(path), tuple(spec.shape), spec.dtype))
        calls: dict[str, list[Hashable]] = {path: [] for path in parameters}
        stages: dict[str, set[int]] = {path: set() for path in parameters}
        for stage in plan.stages:
            for node in graph.nodes[stage.start : stage.stop]:
                for path in _prefixes(node.module_path):
                    if path in calls:
                        calls[path].append((node.kind, node.target.removeprefix(path), node.place))
                        stages[path].add(stage.index)
        alike: dict[Hashable, list[str]] = defaultdict(list)
        for path, own in parameters.items():
            alike[path.rpartition(".")[0], frozenset(own), tuple(calls[path])].append(path)
        groups = [paths for paths in alike.values() if len(paths) > 1]
        inside = tuple(f"{path}." for paths in groups for path in paths)
        groups = [paths for paths in groups if not paths[0].startswith(inside)]
        self.paths = [path for paths in groups for path in paths]
        self._alone: list[list[str]] = []  # the blocks of one kind that one stage runs, and no other one
        for paths in groups:
            of_stage: dict[int, list[str]] = defaultdict(list)
            for path in paths:
                if len(stages[path]) == 1:
                    of_stage[min(stages[path])].append(path)
            self._alone += of_stage.values()

    def beyond(self, most: int) -> tuple[str, ...]:
        """Return the blocks to leave out if each stage keeps ``most`` of each kind that it runs alone."""
        return tuple(path for paths in self._alone for path in paths[most:])

    def fitting(self, prepared: Prepared, need: Need, beside: int = 0) -> tuple[tuple[str, ...], Place] | None:
        """Return the blocks to leave out so that a comparison fits, and where it fits; None if it does not.

        ``need``: of a comparison with the complete model. ``beside``: as for ``place_of``.
        """
        costs = prepared.profile.at(prepared.plan.microbatch_size).costs
        sizes = [(name, _OF_A_WEIGHT * spec.num_bytes({})) for name, spec in self._graph.parameters.items()]
        sizes += [(node.module_path, costs[node.name].saved_bytes) for node in self._graph.nodes]
        in_blocks, total = dict.fromkeys(self.paths, 0), sum(size for _, size in sizes)
        for name, size in sizes:
            for path in in_blocks.keys() & {*_prefixes(name)}:
                in_blocks[path] += size
        for most in range(max(map(len, self._alone), default=0) - 1, 0, -1):
            paths = self.beyond(most)
            share = 1 - sum(map(in_blocks.__getitem__, paths)) / total
            host, device = (round(share * size * _RESERVE) for size in (need.host_bytes, need.device_bytes))
            part = dataclasses.replace(need, host_bytes=host, device_bytes=device, flops=need.flops * share)
            place = place_of(prepared, part, beside)
            if place.device:
                return paths, place
        return None

    def without(self, paths: tuple[str, ...]) -> str:
        """Return how many blocks are compared: ``6 of 48 blocks``."""
        return f"{len(self.paths) - len(paths)} of {len(self.paths)} blocks"


def _prefixes(path: str) -> Iterator[str]:
    """Yield ``a``, ``a.b`` and ``a.b.c`` of ``a.b.c``."""
    return itertools.accumulate(path.split("."), "{}.{}".format)


@contextmanager
def without_blocks(prepared: Prepared, paths: tuple[str, ...], scratch: str) -> Iterator[Prepared]:
    """Yield the run without these blocks. ``scratch``: the folder for its stages; "": the usual one.

    Raises: RunError if the model cannot be built, captured or cut without them.
    """
    plan, graph, workload = prepared.plan, prepared.graph, prepared.workload
    kind = prepared.profile.device.kind
    with TemporaryDirectory(prefix="autopipe-blocks-", dir=scratch or None) as stages, workload.models.without(paths):
        try:
            captured = capture(
                workload,
                allow_data_dependent=prepared.allow_data_dependent,
                verify=kind == "cpu",
                lengths=len(graph.symbols) > 1,
            )
            captured = of_same_team(described_on(kind, captured, workload), plan, prepared.stages, workload)
            cut = _with_own_state(map_cuts_to(plan, graph, captured.graph, all_connected=True), captured.graph)
            generate(captured, cut, Path(stages))
        except Exception as error:  # of the user's code, too, which may count on all blocks
            text = error.what if isinstance(error, AutopipeError) else f"{type(error).__name__}: {error}"
            text = out_of_memory(error, "cpu") or f"the model does not work without some of its blocks ({text})"
            raise RunError(text) from error
        yield dataclasses.replace(prepared, graph=captured.graph, plan=cut, stages=Path(stages), placeholders=None)


def _with_own_state(plan: Plan, graph: Graph) -> Plan:
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
