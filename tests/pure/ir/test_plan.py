"""Plans: contradictions are refused, by the plan itself or against its graph."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from support.planning_cases import chain

from autopipe.errors import ArtifactError, VersionError
from autopipe.ir import artifact
from autopipe.ir.cluster import Cluster, ClusterDevice, Level
from autopipe.ir.graph import Graph
from autopipe.ir.plan import Boundary, Plan, Prediction, Stage, Tie, bytes_by_rank
from autopipe.ir.plan_fits_graph import refuse_disagreement
from autopipe.ir.tensor import TensorSpec
from autopipe.planning import PlanOptions, make_plan

SPEC = TensorSpec(("s0", 4), "float32", requires_grad=True)
STAGE = Stage(0, 0, 2, "a", "b", (0,), ("a.w",), 1.0, 2.0, 100, buffers=("mean",))
BOUNDARY = Boundary("a", 0, (1,), SPEC, 8)
PROFILE = chain(6)
CLUSTER = Cluster((Level("node", 3, 1e9, 0.0),), (ClusterDevice("v"),), "test")


def planned() -> Plan:
    return make_plan(PROFILE, CLUSTER, PlanOptions(num_ranks=3, batch_size=8, num_microbatches=4, schedule="1f1b"))


@pytest.mark.parametrize(
    ("value", "fields", "message"),
    [
        (STAGE, {"ranks": ()}, r"stage 0 needs at least one rank, and each rank once; its ranks are \[\]"),
        (STAGE, {"ranks": (1, 1)}, r"its ranks are \[1, 1\]"),
        (STAGE, {"ranks": (-1,)}, r"its ranks are \[-1\]"),
        (STAGE, {"parameters": ("a.w", "a.w")}, "stage 0 has the same parameter or buffer twice"),
        (STAGE, {"buffers": ("mean", "mean")}, "stage 0 has the same parameter or buffer twice"),
        (STAGE, {"backward_seconds": -1.0}, "stage 0: seconds and bytes must be at least 0"),
        (BOUNDARY, {"consumers": ()}, "boundary a: its consumers must be in ascending order"),
        (BOUNDARY, {"consumers": (2, 1)}, r"boundary a: its consumers must be in ascending order, and are \[2, 1\]"),
        (BOUNDARY, {"producer": 1}, "boundary a does not go forward: stage 1 to stage 1"),
        (BOUNDARY, {"bytes": -1}, "boundary a: bytes must be at least 0, and is -1"),
        (Tie("w", 0, (1,), True), {"copies": ()}, r"w: the stages of a tie must be in ascending order, and are \[0\]"),
        (Tie("w", 0, (1,), True), {"owner": 1}, r"w: the stages of a tie must be in ascending order, and are \[1, 1\]"),
        (Prediction(1.0, 1.0, 0.5, 1.0), {"step_seconds": -1.0}, "a prediction must be at least 0"),
        (Prediction(1.0, 1.0, 0.5, 1.0), {"bubble_fraction": 1.5}, "its bubble fraction at most 1"),
    ],
)
def test_a_part_out_of_range_is_refused(value: Any, fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(value, **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (lambda plan: {"stages": ()}, "a plan has at least one stage"),
        (lambda plan: {"stages": plan.stages[1:]}, "stage 0 must be number 0 and begin at node 0; it is number 1"),
        (
            lambda plan: {"boundaries": (dataclasses.replace(plan.boundaries[0], consumers=(1, 3)),)},
            "goes to stage 3; there are 3 stages",
        ),
        (lambda plan: {"ties": (Tie("w", 0, (3,), True),)}, r"w is tied over stages \[0, 3\]; there are 3 stages"),
        (lambda plan: {"num_ranks": 4}, r"the stages must use all of 4 ranks, and use \[0, 1, 2\]"),
        (lambda plan: {"num_microbatches": 9}, "a batch of 8 samples cannot be split into 9 microbatches"),
        (lambda plan: {"num_microbatches": 0}, "a batch of 8 samples cannot be split into 0 microbatches"),
    ],
)
def test_a_contradiction_within_a_plan_is_refused(fields: Any, message: str) -> None:
    plan = planned()
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(plan, **fields(plan))


def with_stage(plan: Plan, index: int, **fields: object) -> Plan:
    stages = list(plan.stages)
    stages[index] = dataclasses.replace(stages[index], **fields)  # type: ignore[arg-type]
    return dataclasses.replace(plan, stages=tuple(stages))


def with_boundary(plan: Plan, **fields: object) -> Plan:
    first, *rest = plan.boundaries
    return dataclasses.replace(plan, boundaries=(dataclasses.replace(first, **fields), *rest))  # type: ignore[arg-type]


def for_graph(plan: Plan, graph: Graph) -> Plan:
    return dataclasses.replace(plan, graph_digest=graph.digest)


def test_a_plan_agrees_with_its_graph() -> None:
    refuse_disagreement(planned(), PROFILE.graph)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plan: dataclasses.replace(plan, graph_digest="other"), "it was made for model other, and the model is"),
        (lambda plan: with_stage(plan, 2, stop=7), "its stages end at node 7 of 6"),
        (lambda plan: with_stage(plan, 0, first="gone"), "stage 0 is named gone .. "),
        (lambda plan: dataclasses.replace(plan, boundaries=()), "it sends nothing, but its cuts send "),
        (lambda plan: with_boundary(plan, spec=SPEC), r" as float32\[s0, 4\], but in the model it is "),
        (lambda plan: with_stage(plan, 1, parameters=()), "stage 1 runs .* without its parameter "),
        (
            lambda plan: with_stage(plan, 0, parameters=(*plan.stages[0].parameters, "gone.w")),
            r"stage 0 has parameter gone\.w, which the model does not have",
        ),
        (
            lambda plan: with_stage(plan, 0, parameters=(*plan.stages[0].parameters, plan.stages[1].parameters[0])),
            r"is tied over stages \[\], but stages \[0, 1\] have it",
        ),
    ],
)
def test_a_plan_that_contradicts_its_graph_is_refused(change: Any, message: str) -> None:
    with pytest.raises(ArtifactError, match=message) as caught:
        refuse_disagreement(change(planned()), PROFILE.graph)
    assert caught.value.remedy.endswith("--gpus 3")


def test_a_parameter_in_no_stage_is_refused() -> None:
    graph = dataclasses.replace(PROFILE.graph, parameters={**PROFILE.graph.parameters, "spare.w": SPEC})
    with pytest.raises(ArtifactError, match=r"parameter spare\.w is in no stage"):
        refuse_disagreement(for_graph(planned(), graph), graph)


def test_a_divided_optimizer_state_is_another_plan() -> None:
    plan = planned()
    assert dataclasses.replace(plan, shard_optimizer=True).digest != plan.digest


def test_a_third_output_is_refused() -> None:
    names = tuple(node.name for node in PROFILE.graph.nodes)
    graph = dataclasses.replace(PROFILE.graph, outputs=(names[-1], names[0], names[1]))
    with pytest.raises(ArtifactError, match="the model has 3 outputs; expected the loss, or the loss and its weight"):
        refuse_disagreement(for_graph(planned(), graph), graph)


def test_a_cut_that_is_not_legal_is_refused() -> None:
    plan = planned()
    start = plan.stages[1].start
    nodes = list(PROFILE.graph.nodes)
    nodes[start] = dataclasses.replace(nodes[start], glued=True)
    graph = dataclasses.replace(PROFILE.graph, nodes=tuple(nodes))
    with pytest.raises(ArtifactError, match=f"stage 1 begins at node {start}, which is not a legal cut"):
        refuse_disagreement(for_graph(plan, graph), graph)


def test_the_label_of_a_stage_has_its_modules_or_its_nodes() -> None:
    assert (STAGE.name, STAGE.label) == ("a .. b", "stage 0")
    named = dataclasses.replace(STAGE, modules="blocks.0")
    assert (named.name, named.label) == ("blocks.0", "stage 0 (blocks.0)")


def test_a_plan_of_the_format_before_recompute_by_block_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    artifact.save(planned(), path)
    document = json.loads(path.read_text())
    assert document["schema_version"] == 2
    path.write_text(json.dumps(document | {"schema_version": 1}))
    with pytest.raises(VersionError, match=r"a Plan of format 1, and this version reads format 2") as caught:
        artifact.load(Plan, path, renew="autopipe plan")
    assert caught.value.remedy == "autopipe plan"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"recompute": "always"}, "recompute must be one of never, block, stage, and is 'always'"),
        ({"recompute": "block"}, "recompute 'block' does not agree with its units"),
        ({"units": ((0, 1),)}, "recompute 'never' does not agree with its units"),
        ({"recompute": "block", "units": ((1, 0),)}, "recompute 'block' does not agree with its units"),
        ({"recompute": "block", "units": ((0, 99),)}, "recompute 'block' does not agree with its units"),
    ],
)
def test_units_are_in_their_stage(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(STAGE, **fields)


def test_recompute_adds_a_forward() -> None:
    assert STAGE.seconds == 3.0
    assert dataclasses.replace(STAGE, recompute="stage", recompute_seconds=STAGE.forward_seconds).seconds == 4.0


def test_the_memory_of_a_rank_is_the_sum_of_its_stages() -> None:
    stages = [STAGE, dataclasses.replace(STAGE, index=1, ranks=(0, 1), peak_bytes=7)]
    assert bytes_by_rank(stages) == {0: 107, 1: 7}
