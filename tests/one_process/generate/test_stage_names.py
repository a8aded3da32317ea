"""Tables, progress lines and errors name stages by the modules of the model."""

import dataclasses
import io
from typing import Any

import pytest
from rich.console import Console
from support.pipelines import captured, plan_for

from autopipe.errors import WorkerError
from autopipe.ir.cluster import Cluster, ClusterDevice, Level
from autopipe.planning.cut_mapping import map_cuts_to
from autopipe.report.results import CheckReport, ParameterError, StagePeak, TrainResult
from autopipe.report.run_tables import result_tables
from autopipe.report.tables import check, stage_table

CLUSTER = Cluster((Level("host", 2, 1e10, 1e-6),), (ClusterDevice("cpu"),), "test")


def shown(*parts: Any) -> str:
    console = Console(width=300, record=True, file=io.StringIO())
    for part in parts:
        console.print(part)
    return console.export_text()


def test_the_stages_of_a_transformer_are_its_blocks() -> None:
    plan = plan_for(captured("gpt"), 2, "1f1b", 4, 8)
    first, last = plan.stages
    assert first.modules.startswith("tokens, positions, blocks.0") and last.modules.endswith("norm, head")
    text = shown(stage_table(plan, CLUSTER))
    assert first.modules in text and last.modules in text and first.last not in text
    assert last.label == f"stage 1 ({last.modules})"
    graph = captured("gpt").profile.graph
    emptied = dataclasses.replace(plan, stages=tuple(dataclasses.replace(s, modules="") for s in plan.stages))
    assert [stage.modules for stage in map_cuts_to(emptied, graph, graph).stages] == [first.modules, last.modules]
    assert emptied.stages[0].name == f"{first.first} .. {first.last}" and emptied.digest == plan.digest


def test_tables_of_runs_and_comparisons_have_the_names() -> None:
    names = ("emb, blocks.0", "blocks.1, head")
    result = TrainResult((1.0,), 1, 1.0, 1.0, 2, "1f1b", 2, "", "", modules=names)
    peak = StagePeak(**{field.name: 1 for field in dataclasses.fields(StagePeak)})
    assert "blocks.1, head" in shown(*result_tables(dataclasses.replace(result, peaks=(peak,))))
    report = CheckReport(False, False, 0.5, (ParameterError("w", 0.5, 1),), modules=names, losses=(1.0,))
    assert "1 (blocks.1, head)" in shown(*check(report))


def test_an_error_of_a_rank_names_the_modules_of_its_stage() -> None:
    error = WorkerError("boom", rank=1, stage=1, modules="blocks.3 to blocks.5", instruction="1F3", where="model.py:7")
    assert "at:  rank 1, stage 1 (blocks.3 to blocks.5), instruction 1F3; model.py:7" in str(error)


@pytest.mark.parametrize("modules", ["", "a, b"])
def test_a_stage_without_modules_is_a_number_in_sentences(modules: str) -> None:
    stage = dataclasses.replace(plan_for(captured("gpt"), 2, "1f1b", 4, 8).stages[0], modules=modules)
    assert stage.label == ("stage 0 (a, b)" if modules else "stage 0")
