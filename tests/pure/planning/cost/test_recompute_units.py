"""The recompute units of a graph, and the modes that stages use with them."""

import dataclasses

import pytest
from support.planning_cases import GIB, chain, even_profile, machine

from autopipe.errors import PlanError
from autopipe.ir.cuts import Cuts
from autopipe.ir.profile import Profile
from autopipe.planning import PlanOptions, make_plan
from autopipe.planning.cost.atoms import Atoms, may_run_twice
from autopipe.planning.explain import explain


def in_modules(profile: Profile, path_of: dict[int, str]) -> Profile:
    """Return the profile with nodes, by position, in modules."""
    nodes = [
        dataclasses.replace(node, module_path=path_of.get(k, ""), module_type="Layer")
        for k, node in enumerate(profile.graph.nodes)
    ]
    return dataclasses.replace(profile, graph=dataclasses.replace(profile.graph, nodes=tuple(nodes)))


def checkpointed(profile: Profile, calls: list[int]) -> Profile:
    """Return the profile with the number of the call of checkpoint() for every node."""
    pairs = zip(profile.graph.nodes, calls, strict=True)
    nodes = tuple(dataclasses.replace(node, checkpoint=call) for node, call in pairs)
    return dataclasses.replace(profile, graph=dataclasses.replace(profile.graph, nodes=nodes))


def spans_of(profile: Profile) -> tuple[tuple[int, int], ...]:
    return Atoms(profile.graph, Cuts(profile.graph), profile.at(2)).units.spans


def test_the_repeated_blocks_of_a_model_are_units_and_what_lies_between_them() -> None:
    paths = {k: f"blocks.{(k - 1) // 3}.linear{(k - 1) % 3}" for k in range(1, 10)}
    assert spans_of(in_modules(chain(11), paths)) == ((0, 1), (1, 4), (4, 7), (7, 10), (10, 11))


def test_of_nested_blocks_those_that_need_less_memory_are_units() -> None:
    paths = {k: f"layers.{k // 6}.blocks.{k % 6 // 2}.linear{k % 2}" for k in range(12)}
    assert spans_of(in_modules(chain(12, output=GIB // 16), paths)) == tuple((k, k + 2) for k in range(0, 12, 2))
    # where much crosses between the inner ones, the outer ones
    assert spans_of(in_modules(chain(12, output=GIB * 3), paths)) == ((0, 6), (6, 12))


def test_a_model_without_blocks_is_divided_into_about_sqrt_n_units() -> None:
    # n layers that save as much as they send: k units keep k - 1 results, and n/k layers in the largest
    assert len(spans_of(chain(16, saved=GIB, output=GIB))) in (4, 5)
    assert 8 <= len(spans_of(chain(64, saved=GIB, output=GIB))) <= 9


def test_units_do_not_begin_where_much_crosses() -> None:
    profile = chain(12, saved=GIB, output=GIB // 2)
    wide = {"layer2", "layer5", "layer8"}  # a cut behind one of these sends as much as four layers save
    nodes = []
    for node in profile.graph.nodes:
        spec = dataclasses.replace(node.spec, shape=("s0", GIB)) if node.name in wide else node.spec
        nodes.append(dataclasses.replace(node, spec=spec))
    wider = dataclasses.replace(profile, graph=dataclasses.replace(profile.graph, nodes=tuple(nodes)))
    starts = {first for first, _ in spans_of(wider)} - {0}
    assert starts
    assert not starts & {3, 6, 9}


def test_the_users_calls_of_checkpoint_are_the_only_units() -> None:
    profile = checkpointed(chain(8), [0, 1, 1, 0, 2, 2, 2, 0])
    assert spans_of(profile) == ((1, 3), (4, 7))


def test_batch_memory_that_changes_later_is_not_read_twice() -> None:
    graph = even_profile(6).graph
    change = dataclasses.replace(graph.nodes[4], inputs=("n3", "x"), mutates=("x",))
    changed = dataclasses.replace(graph, nodes=(*graph.nodes[:4], change, graph.nodes[5]))
    assert [may_run_twice(Cuts(graph), 0, 2), may_run_twice(Cuts(changed), 0, 2)] == [True, False]
    assert may_run_twice(Cuts(changed), 1, 3)  # reads no memory of the batch


def options_of(recompute: str, schedule: str = "gpipe", ranks: int = 2) -> PlanOptions:
    return PlanOptions(num_ranks=ranks, batch_size=8, num_microbatches=4, schedule=schedule, recompute=recompute)


def modes(profile: Profile, recompute: str, memory: float = 0.0, schedule: str = "gpipe") -> list[str]:
    return [s.recompute for s in make_plan(profile, machine(2, memory), options_of(recompute, schedule)).stages]


def test_each_stage_uses_the_fastest_mode_that_fits() -> None:
    profile = chain(8, output=GIB // 8)
    peaks = {}
    for mode in ("never", "block", "stage"):
        plan = make_plan(profile, machine(2), options_of(mode))
        assert [stage.recompute for stage in plan.stages] == [mode, mode]
        peaks[mode] = max(stage.peak_bytes for stage in plan.stages) / GIB
    assert peaks["block"] < peaks["stage"] < peaks["never"]
    for mode, memory in peaks.items():
        assert set(modes(profile, "auto", memory)) <= {"never", mode if mode != "stage" else "block"}
    assert modes(profile, "auto") == ["never", "never"]
    assert modes(profile, "auto", peaks["block"]) == ["block", "block"]
    assert modes(profile, "always") == ["block", "block"]
    # with much between the units, less fits than with the inputs of the stage alone
    assert "stage" in modes(chain(8, output=2 * GIB, saved=2 * GIB), "auto", 36)


def test_calls_of_checkpoint_stay_recomputed_unless_recompute_is_off() -> None:
    profile = checkpointed(chain(8), [1, 1, 0, 2, 2, 3, 3, 0])
    assert modes(profile, "auto") == ["block", "block"]
    assert modes(profile, "never") == ["never", "never"]
    plan = make_plan(profile, machine(2), options_of("auto", "zero-bubble"))
    assert [stage.recompute for stage in plan.stages] == ["never", "never"]
    assert plan.notes == (
        "zero-bubble keeps the activations of the model's checkpoint() calls, because it splits the backward; other "
        "schedules recompute them",
    )


def test_the_last_unit_of_a_stage_with_one_microbatch_in_flight_is_not_recomputed() -> None:
    profile, options = chain(16, saved=GIB, output=GIB // 16), options_of("block", "1f1b")
    plan = make_plan(profile, machine(2), options)
    first, last = plan.stages
    assert first.units[-1][1] == first.stop
    assert last.units[-1][1] < last.stop
    assert last.recompute_seconds < last.forward_seconds == pytest.approx(0.02 * (last.stop - last.start))
    (reason,) = explain(plan, profile, machine(2), options).cuts
    assert reason.earlier_seconds == pytest.approx(last.seconds + 0.02 * 4)  # of one layer more, which is recomputed


def test_block_is_refused_with_the_reason() -> None:
    with pytest.raises(PlanError, match="does not work with zero-bubble: it splits the backward"):
        make_plan(chain(8), machine(2), options_of("block", "zero-bubble"))
    with pytest.raises(PlanError, match="finds no parts of the model"):
        make_plan(chain(2, saved=0), machine(2), options_of("block"))
