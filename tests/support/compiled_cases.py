"""Plans of random cases as text: run as a module, with and without numba, to compare the compiled code with plain code.

``python -m support.compiled_cases COUNT`` prints them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import sys

import numpy as np

from autopipe.errors import PlanError
from autopipe.ir.artifact import canonical
from autopipe.planning import make_plan
from autopipe.planning.pipedream import model
from autopipe.planning.pipedream.file_format import LayerGraph
from autopipe.planning.search import bottleneck
from support.pipedream_cases import random_layers
from support.planning_cases import replicated_case

MACHINES = [(1,), (3,), (4,), (2, 2), (3, 2), (2, 3), (3, 3), (1, 2), (2, 1), (2, 2, 2), (2, 2, 3)]


def layers(rng: random.Random) -> LayerGraph:
    """Return a random graph of layers, a chain in half of the cases; some layers take no time."""
    graph = random_layers(rng, rng.randrange(1, 9))
    if rng.random() < 0.3:
        free = [rng.random() < 0.5 for _ in graph.names[1:]]
        zero = {name: tuple(0.0 if skip else s for skip, s in zip((False, *free), getattr(graph, name), strict=True))
                for name in ("forward_seconds", "backward_seconds")}  # fmt: skip
        graph = dataclasses.replace(graph, **zero)
    if rng.random() < 0.5:
        graph = dataclasses.replace(graph, edges=tuple(itertools.pairwise(range(len(graph.names)))))
    return graph


def pipedream_plan(seed: int) -> str:
    """Return a plan by PipeDream's formulas, or its refusal; the limits of the searches are small in some cases."""
    rng = random.Random(seed)
    graph, counts = layers(rng), rng.choice(MACHINES)
    size, bandwidth = math.fsum(graph.activation_bytes) + math.fsum(graph.parameter_bytes), 10 ** rng.uniform(-1, 2)
    memory = rng.choice((0, size * rng.uniform(0.2, 2)))
    machine = model.Machine(counts, tuple(bandwidth / 4**level for level in range(len(counts))), memory)
    model.MOST_NESTED_STEPS, model.MOST_PLACED_STEPS, model.MOST_PAIRS = rng.choice(
        [(20_000_000, 30_000_000, 60_000_000)] * 4
        + [(rng.randrange(200), 10, 20), (10, rng.randrange(200), 60_000_000)]
    )
    try:
        return str(model.plan_layers(graph, machine, straight=rng.random() < 0.2))
    except PlanError as error:
        return str(error)


def replicated_plan(seed: int, *, by_loops: bool) -> str:
    """Return a plan with replicas, or its refusal. ``by_loops``: search with the loops that numba compiles."""
    bottleneck.HAVE_NUMBA = by_loops
    try:
        with np.errstate(invalid="ignore"):  # scalars of numpy warn of infinity times 0, compiled ones do not
            return canonical(make_plan(*replicated_case(seed)))
    except PlanError as error:
        return str(error)


def main(count: int) -> None:
    """Print the plans of so many cases, by both cost models."""
    for seed in range(count):
        print(pipedream_plan(seed))
    plain = not bottleneck.HAVE_NUMBA
    for seed in range(count):
        plan = replicated_plan(seed, by_loops=True)
        if plain:  # without numba, arrays are searched instead
            assert plan == replicated_plan(seed, by_loops=False), seed
        print(plan)


if __name__ == "__main__":
    main(int(sys.argv[1]))
