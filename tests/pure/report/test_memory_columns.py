"""The columns on memory count every stage of a rank."""

import io
import json

import pytest
from rich.console import Console
from support.planning_cases import chain, machine

from autopipe.cli import documents
from autopipe.ir.plan import bytes_by_rank
from autopipe.planning import PlanOptions, comparison, make_plan
from autopipe.planning.compare import Contender
from autopipe.report import plans, tables
from autopipe.units import in_bytes

GIB = 2**30
PROFILE = chain(8)


def looped(memory_gib=100.0):
    """Return a plan with two stages on each of two ranks, and the cluster."""
    cluster = machine(2, memory_gib)
    options = PlanOptions(
        num_ranks=2, batch_size=16, num_microbatches=8, schedule="interleaved", stages_per_rank=2, recompute="never"
    )
    plan = make_plan(PROFILE, cluster, options)
    assert len(plan.stages) == 4
    return plan, cluster, options


def shown(*parts):
    console = Console(width=200, file=io.StringIO(), record=True)
    for part in parts:
        console.print(part)
    return console.export_text()


def test_what_is_to_spare_is_what_all_stages_of_a_rank_leave():
    plan, cluster, _ = looped()
    used = bytes_by_rank(plan.stages)
    rows = [line for line in shown(tables.stage_table(plan, cluster)).splitlines() if line.strip()[:1].isdigit()]
    for stage, row in zip(plan.stages, rows[-4:], strict=True):
        left = 100 * GIB - used[stage.ranks[0]]
        assert left < 100 * GIB - stage.peak_bytes
        assert in_bytes(stage.peak_bytes) in row and in_bytes(left) in row


def test_the_most_memory_is_that_of_a_rank():
    plan, cluster, options = looped()
    result = comparison(PROFILE, cluster, options, current=plan)
    most = max(bytes_by_rank(plan.stages).values())
    assert in_bytes(most) in shown(*plans.comparison(result))
    assert documents._contender(Contender("this", plan, ""))["plan"]["peak_bytes"] == most


@pytest.mark.parametrize(("share", "little"), [(0.5, False), (0.96, True), (1.0, True)])
def test_a_device_that_is_almost_full_is_mentioned(share, little):
    plan, cluster, _ = looped()
    numbers = plans.fit(plan, PROFILE, cluster)
    assert numbers.most_bytes == max(bytes_by_rank(plan.stages).values())
    full = plans.Fit(
        "cpu", 2, "fp32", numbers.most_bytes, round(numbers.most_bytes / share), tokens_per_second=None, mfu=None
    )
    assert ("\nlittle to spare: " in plans.fit_lines(full, plan)) == little
    assert json.dumps(full.document())
