"""Plans that leave ranks unused."""

import dataclasses

from support.planning_cases import chain

from autopipe.commands.planning.choose import choose_plan
from autopipe.commands.store import Work
from autopipe.planning.baselines import compare_plan, explain_plan
from autopipe.planning.requests import PlanRequest

FOUND = chain(8, saved=2**20, weight=2**20, output=2**20)


def test_by_default_no_plan_is_slower_than_one_rank(tmp_path):
    """A model whose replicas would average a buffer is cut into stages only if that pays, and only as many."""
    node = dataclasses.replace(FOUND.graph.nodes[0], buffers=("mean",), buffers_written=("mean",))
    graph = dataclasses.replace(
        FOUND.graph, nodes=(node, *FOUND.graph.nodes[1:]), buffers={"mean": FOUND.graph.parameters["layer0.weight"]}
    )
    normalized = dataclasses.replace(FOUND, graph=graph)

    def planned(link, **options):
        work = Work.begin(tmp_path, None)
        request = PlanRequest(gpus=4, gpu_memory_bytes=2**36, link=link, **options)
        return choose_plan(normalized, request, work, 32), work.notes

    assert len(planned(1e9)[0].plan.stages) == 4
    slow, notes = planned(2e4)
    assert len(slow.plan.stages) == slow.plan.num_ranks == 1
    assert "3 of 4 ranks stay unused: they would not make a step faster" in notes
    compared = compare_plan(slow.plan, normalized, slow.record.cluster, slow.space)
    assert max(c.plan.predicted.samples_per_second for c in compared.contenders[:3]) > 0
    assert len(compared.contenders[2].plan.stages) == 4
    assert explain_plan(slow.plan, normalized, slow.record.cluster, slow.space).cuts == ()
    asked, _ = planned(2e4, replicas="never")
    assert len(asked.plan.stages) == 4
    assert asked.plan.predicted.step_seconds > slow.plan.predicted.step_seconds
