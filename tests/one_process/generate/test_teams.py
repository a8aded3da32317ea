"""The generated stage of a team, one thread for each member, equals ``Members``, which adds the same parts.

What its members exchange, counted, is what ``ir.teams.exchanged`` says.
"""

import dataclasses
import functools
import re
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.axes import Body, Layers, Merged, Module, Vocabulary, Wide, workload
from support.models.transformers import MODELS, toy_of
from support.pipelines import plan_for, profile_of
from torch.nn import functional

from autopipe.errors import TraceError
from autopipe.generate import generate
from autopipe.generate.loader import load_constants, load_stage
from autopipe.ir.profile import WorkloadSpec
from autopipe.ir.teams.axis_sets import choose, num_bytes
from autopipe.ir.teams.exchanged import GATHER, SCATTER, SUM, Exchange, team_bytes
from autopipe.trace import capture
from autopipe.trace.axes import Members, choose_verified, find_axes
from autopipe.trace.teams import member_of, of_team
from autopipe.workload import Workload

SECONDS = 60.0
WHERE = 3, 1, 2  # run seed, minibatch, microbatch


class ThreadTeam:
    """One member of a team of threads."""

    def __init__(self, member: int, size: int, barrier: threading.Barrier, parts: dict[int, torch.Tensor]) -> None:
        self.member, self.size = member, size
        self._barrier, self._parts = barrier, parts
        self.exchanged: list[Exchange] = []

    def _each(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._parts[self.member] = tensor.clone()
        self._barrier.wait(SECONDS)
        each = [self._parts[member] for member in range(self.size)]
        self._barrier.wait(SECONDS)
        return each

    def add(self, tensor: torch.Tensor) -> None:
        self.exchanged.append(Exchange(SUM, tensor.numel() * tensor.element_size()))
        tensor.copy_(added(self._each(tensor)))

    def add_parts(self, parts: torch.Tensor) -> torch.Tensor:
        assert len(parts) == self.size
        self.exchanged.append(Exchange(SCATTER, parts.numel() * parts.element_size()))
        return added([each[self.member] for each in self._each(parts)])

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        self.exchanged.append(Exchange(GATHER, self.size * part.numel() * part.element_size()))
        return torch.stack(self._each(part))


def added(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


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


def assert_equal_to_members(subject, captured, leaves, size, folder: Path, num_stages=1, sequence=False):
    """Assert that loss and gradients are equal bit for bit, and to those of the complete model within rounding.

    With ``sequence``, gradients of whole parameters are added over positions in another order, and equal within
    rounding. Returns the text of the stages, and the share of the bytes of the parameters that is cut.
    """
    chosen = choose_verified(captured, find_axes(captured).axes, leaves, size)
    assert chosen.notes == ()
    expected = Members(captured.graph, captured.module, chosen.axes, size).run(leaves, WHERE)
    of_member = member_of(captured, chosen.axes, size, sequence=sequence)
    plan = plan_for(profile_of(subject, of_member), num_stages, "1f1b", 1, len(next(iter(leaves.values()))))
    plan = dataclasses.replace(plan, team=size)
    paths = generate(of_member, plan, folder)
    codes = [
        load_stage(folder, index, graph_digest=of_member.graph.digest, plan_digest=plan.digest)
        for index in range(num_stages)
    ]
    models = [[subject.build_model() for _ in codes] for _ in range(size)]
    by_position = {*of_member.partial} - {name for axis in chosen.axes for name in axis.partial}
    assert bool(by_position) == sequence

    def run(team):
        values = {name: leaf.clone() for name, leaf in leaves.items()}
        parameters: dict[str, list[torch.Tensor]] = {}
        for code, model in zip(codes, models[team.member], strict=True):
            stage = code.adopt(model, load_constants(folder))
            stage.join(team)
            stage.seed(WHERE)
            outputs = stage(*(values[name] for name in (*code.INPUTS, *code.RECEIVES)))
            values |= dict(zip((*code.SENDS, *code.RETURNS), outputs, strict=True))
            for name, parameter in stage.named_parameters():
                parameters.setdefault(name, []).append(parameter)
        loss = values[codes[-1].RETURNS[0]]
        forward = [*team.exchanged]
        loss.backward()
        backward = team.exchanged[len(forward) :]
        for name in by_position:
            for parameter in parameters[name]:
                if parameter.grad is not None:
                    team.add(parameter.grad)
        gradients = {name: [each.grad for each in uses] for name, uses in parameters.items()}
        return loss.detach(), gradients, (forward, backward)

    sizes = {s.name: leaves[s.input].shape[s.dimension] for s in of_member.graph.symbols}
    planned = team_bytes(of_member.graph, sizes, size)
    forward = [count for node in of_member.graph.nodes if node.name in planned for count in planned[node.name].forward]
    backward = [count for amounts in planned.values() for count in amounts.backward]
    for member, (loss, gradients, exchanged) in enumerate(on_members(size, run)):
        assert exchanged[0] == forward
        assert Counter(exchanged[1]) == Counter(backward)
        assert torch.equal(loss, expected.outputs[0][member].detach())
        for name, each in expected.gradients.items():
            ours = [gradient for gradient in gradients[name] if gradient is not None]
            assert bool(ours) == (each[member] is not None), name
            if len(gradients[name]) > 1:  # the stages of a tied parameter add in another order than autograd
                assert torch.allclose(sum(ours), each[member], rtol=1e-5, atol=1e-7), name
            elif ours and name in by_position:
                largest = float(each[member].abs().max())
                assert torch.allclose(ours[0], each[member], rtol=0, atol=2e-6 * largest), name
            elif ours:
                assert torch.equal(ours[0], each[member]), name
    graph, cut = captured.graph, [name for name in of_member.shards if name in captured.graph.parameters]
    share = num_bytes(graph, cut) / num_bytes(graph, graph.parameters)
    return "".join(path.read_text() for path in paths), share


@functools.cache
def transformer(name):
    toy = toy_of(name)
    return toy, capture(toy, verify=False, lengths=False)


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("default")
def test_a_transformer(name, num_stages, tmp_path):
    pytest.importorskip("transformers")
    toy, captured = transformer(name)
    leaves = toy.leaves(toy.example_item(3))
    text, share = assert_equal_to_members(toy, captured, leaves, 2, tmp_path, num_stages)
    assert share >= 0.8
    assert "dropped(" in text or "attended(" in text or name in WITHOUT_DROPOUT


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith("ViT")])
@pytest.mark.filterwarnings("default")
def test_a_transformer_with_its_own_positions(name, size, num_stages, tmp_path):
    pytest.importorskip("transformers")
    toy, captured = transformer(name)
    leaves = toy.leaves(toy.example_item(3))
    text, _ = assert_equal_to_members(toy, captured, leaves, size, tmp_path, num_stages, sequence=True)
    assert "summed_rows" in text
    assert "entered_rows(" in text
    assert "gathered(" not in text or name.startswith(("Phi3", "Mixtral"))  # slices of positions; rows of experts


WITHOUT_DROPOUT = ("Qwen3ForCausalLM", "Phi3ForCausalLM")


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("size", [2, 4])
def test_the_sample_with_its_own_positions(size, num_stages, tmp_path):
    sample, captured, leaves = the_sample()
    text, _ = assert_equal_to_members(sample, captured, leaves, size, tmp_path, num_stages, sequence=True)
    assert "summed_rows_linear(self, " in text
    assert "entered_rows(self, " in text
    assert "dropped_rows(self, " in text
    assert "gathered(" not in text
    assert "    PARTIAL = (" in text


def the_sample():
    arguments = {"dropout": 0.1, "blocks": 2}
    spec = WorkloadSpec("sample_models/gpt.py", arguments=arguments, hooks={}, inputs=(), seed=0)
    sample = Workload.from_spec(spec)
    return sample, capture(sample, verify=False, lengths=False), sample.leaves(sample.example_item(2))


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("size", [2, 4])
def test_the_sample(size, num_stages, tmp_path):
    sample, captured, leaves = the_sample()
    text, share = assert_equal_to_members(sample, captured, leaves, size, tmp_path, num_stages)
    assert share >= 0.8
    assert f"    TEAM = {size}\n" in text
    assert f".view(batch, 128, 3, {4 // size}, -1)" in text
    assert "vocabulary_cross_entropy(self, head.flatten(0, 1), target.flatten(), 1)" in text
    assert '"blocks.0.attention.qkv.weight": (0, 4, ((0, 32),)),' in text


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize(("size", "sequence"), [(2, False), (4, False), (2, True)])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.filterwarnings("default")
def test_layers_of_torch(batch_first, size, sequence, num_stages, tmp_path):
    toy = workload(lambda: Body(Layers(batch_first), smoothing=0.0))
    captured = capture(toy, verify=False, lengths=False)
    leaves = toy.leaves(toy.example_item(3))
    text, share = assert_equal_to_members(toy, captured, leaves, size, tmp_path, num_stages, sequence)
    assert share >= 0.8
    assert text.count(" = multihead(") == 6  # two layers of an encoder, and two of a decoder with two attentions each
    assert text.count("is_causal=True") == 2
    assert text.count("dropout_p=0.2 if self.training else 0.0") == 6


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("name", "size", "length"), [("ViTForImageClassification", 2, 17), ("", 4, 6)])
@pytest.mark.filterwarnings("default")
def test_a_length_that_members_cannot_divide_is_refused(name, size, length):
    toy = toy_of(name) if name else workload(lambda: Body(Layers(), smoothing=0.0))
    captured = capture(toy, verify=False, lengths=False)
    axes = choose(captured.graph, find_axes(captured).axes, size)
    with pytest.raises(TraceError, match=f"no length of the batch that {size} divides"):
        member_of(captured, axes, size, sequence=True)
    assert f", {length}, " in "".join(str(node.spec) for node in captured.graph.nodes)


@pytest.mark.filterwarnings("default")
def test_layers_of_torch_in_evaluation_mode(tmp_path):
    toy = workload(lambda: Body(Layers(), smoothing=0.0))
    captured = capture(toy, verify=False, lengths=False)
    leaves = toy.leaves(toy.example_item(3))
    axes = choose(captured.graph, find_axes(captured).axes, 2)
    of_member = of_team(captured, axes, 2)
    plan = dataclasses.replace(plan_for(profile_of(toy, of_member), 1, "1f1b", 1, 3), team=2)
    generate(of_member, plan, tmp_path)
    code = load_stage(tmp_path, 0, graph_digest=of_member.graph.digest, plan_digest=plan.digest)
    models = [toy.build_model() for _ in range(3)]

    def run(team):
        stage = code.adopt(models[team.member], load_constants(tmp_path))
        stage.join(team)
        with torch.no_grad():
            return stage.eval()(*(leaves[name] for name in code.INPUTS))[0]

    expected = models[2].eval()(**leaves).detach()
    for loss in on_members(2, run):
        assert torch.allclose(loss, expected, rtol=1e-6)


@pytest.mark.parametrize("options", [{}, {"batch_first": False}, {"width": 8}])
def test_heads_of_torch_with_masks(options, tmp_path):
    toy = workload(lambda: Body(Module(**options)))
    captured = capture(toy, verify=False, lengths=False)
    text, _ = assert_equal_to_members(toy, captured, toy.leaves(toy.example_item(3)), 2, tmp_path)
    assert "attn_mask=mask" in text
    assert "key_padding_mask=padding" in text


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize(("words", "size"), [(9, 2), (8, 3), (13, 4)])
def test_a_padded_vocabulary(words, size, num_stages, tmp_path):
    toy = workload(lambda: Vocabulary(words=words))
    captured = capture(toy, verify=False, lengths=False)
    text, _ = assert_equal_to_members(toy, captured, toy.leaves(toy.example_item(3)), size, tmp_path, num_stages)
    assert f"self.table.weight, 3, size={words})" in text
    assert re.search(rf"vocabulary_log_softmax\(self, .*, 1, size={words}\)", text)
    assert f"vocabulary_nll(self, scores, targets, 1, size={words})" in text
    assert f'"table.weight": (0, {words}, ((0, 1),)),' in text


@pytest.mark.parametrize("dimension", [1, 2])
def test_a_padded_loss_over_another_dimension(dimension, tmp_path):
    class Sampled(Body):
        def forward(self, x, labels):
            logits = self.head(self.last(x + self.inner(self.first(x))))
            if dimension == 1:
                return functional.cross_entropy(logits.transpose(1, 2), labels, reduction="sum", ignore_index=9)
            logs = functional.log_softmax(logits, dim=2, dtype=torch.float64)
            return functional.nll_loss(logs.view(-1, 9), labels.view(-1), ignore_index=3)

    toy = workload(lambda: Sampled(Wide(), classes=9))
    captured = capture(toy, verify=False, lengths=False)
    text, share = assert_equal_to_members(toy, captured, toy.leaves(toy.example_item(3)), 2, tmp_path)
    assert share > 0.8
    assert "size=9" in text
    assert (".view(-1, 5)" in text) == (dimension == 2)


def test_sizes_of_the_batch_are_divided(tmp_path):
    toy = workload(lambda: Body(Merged()))
    captured = capture(toy, verify=False, lengths=False)
    text, _ = assert_equal_to_members(toy, captured, toy.leaves(toy.example_item(3)), 2, tmp_path)
    assert "mul_of_member = batch * 4 // 2" in text
