"""The generated stage of a team, one thread for each member, equals ``Members``, which adds the same parts.

What its members exchange, counted, is what ``ir.teams.exchanged`` says.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.transformers import MODELS, toy_of
from support.pipelines import plan_for, profile_of

from autopipe.generate import generate
from autopipe.generate.loader import load_constants, load_stage
from autopipe.ir.profile import WorkloadSpec
from autopipe.ir.teams.axis_sets import choose
from autopipe.ir.teams.exchanged import team_bytes
from autopipe.trace import capture
from autopipe.trace.axes import Members, find_axes
from autopipe.trace.teams import of_team
from autopipe.workload import Workload

SECONDS = 60.0
WHERE = 3, 1, 2  # run seed, minibatch, microbatch


class ThreadTeam:
    """One member of a team of threads."""

    def __init__(self, member: int, size: int, barrier: threading.Barrier, parts: dict[int, torch.Tensor]) -> None:
        self.member, self.size = member, size
        self._barrier, self._parts = barrier, parts
        self.exchanged: list[int] = []  # bytes

    def add(self, tensor: torch.Tensor) -> None:
        self.exchanged.append(tensor.numel() * tensor.element_size())
        self._parts[self.member] = tensor.clone()
        self._barrier.wait(SECONDS)
        total = self._parts[0].clone()
        for member in range(1, self.size):
            total += self._parts[member]
        self._barrier.wait(SECONDS)
        tensor.copy_(total)


def on_members(size: int, body: Callable[[ThreadTeam], Any]) -> list[Any]:
    """Run ``body`` in a thread for each member, and return the results. Raises: the first failure."""
    barrier, parts = threading.Barrier(size), dict[int, torch.Tensor]()
    results: list[Any] = [None] * size
    failures: list[BaseException] = []

    def run(member: int) -> None:
        torch.set_num_threads(1)
        try:
            results[member] = body(ThreadTeam(member, size, barrier, parts))
        except BaseException as error:
            failures.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(member,), daemon=True) for member in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise next((e for e in failures if not isinstance(e, threading.BrokenBarrierError)), failures[0])
    return results


def assert_equal_to_members(workload, captured, leaves, size, folder: Path):
    """Assert that loss and gradients are equal bit for bit, and return the text of the stage."""
    axes = choose(captured.graph, find_axes(captured).axes, size)
    assert axes
    expected = Members(captured.graph, captured.module, axes, size).run(leaves, WHERE)
    of_member = of_team(captured, axes, size)
    plan = plan_for(profile_of(workload, of_member), 1, "1f1b", 1, len(next(iter(leaves.values()))))
    (path,) = generate(of_member, plan, folder)
    code = load_stage(folder, 0, graph_digest=of_member.graph.digest, plan_digest=plan.digest)
    models = [workload.build_model() for _ in range(size)]

    def run(team):
        stage = code.adopt(models[team.member], load_constants(folder))
        stage.join(team)
        stage.seed(WHERE)
        outputs = stage(*(leaves[name].clone() for name in code.INPUTS))
        forward = [*team.exchanged]
        outputs[0].backward()
        return outputs[0].detach(), dict(stage.named_parameters()), (forward, team.exchanged[len(forward) :])

    sizes = {s.name: leaves[s.input].shape[s.dimension] for s in of_member.graph.symbols}
    planned = team_bytes(of_member.graph, sizes, size)
    forward = [count for node in of_member.graph.nodes if node.name in planned for count in planned[node.name].forward]
    backward = [count for amounts in planned.values() for count in amounts.backward]
    for member, (loss, parameters, exchanged) in enumerate(on_members(size, run)):
        assert exchanged[0] == forward
        assert sorted(exchanged[1]) == sorted(backward)
        assert torch.equal(loss, expected.outputs[0][member].detach())
        for name, gradients in expected.gradients.items():
            ours = parameters[name].grad
            assert (ours is None) == (gradients[member] is None), name
            assert ours is None or torch.equal(ours, gradients[member]), name
    return path.read_text()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("default")
def test_a_transformer(name, tmp_path):
    pytest.importorskip("transformers")
    toy = toy_of(name)
    captured = capture(toy, verify=False, lengths=False)
    assert_equal_to_members(toy, captured, toy.leaves(toy.example_item(3)), 2, tmp_path)


@pytest.mark.parametrize("size", [2, 4])
def test_the_sample(size, tmp_path):
    arguments = {"dropout": 0.1, "blocks": 2}
    workload = Workload.from_spec(
        WorkloadSpec("sample_models/gpt.py", arguments=arguments, hooks={}, inputs=(), seed=0)
    )
    captured = capture(workload, verify=False, lengths=False)
    leaves = workload.leaves(workload.example_item(2))
    text = assert_equal_to_members(workload, captured, leaves, size, tmp_path)
    assert f"    TEAM = {size}\n" in text
    assert f".view(batch, 128, 3, {4 // size}, -1)" in text
    assert "vocabulary_cross_entropy(self, head.flatten(0, 1), target.flatten(), 1)" in text
    assert '"blocks.0.attention.qkv.weight": (0, 4, ((0, 32),)),' in text
