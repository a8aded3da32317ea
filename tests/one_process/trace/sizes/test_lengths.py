"""Symbolic sequence lengths: how they are found, the expressions for them, and when they are rejected."""

import pytest
import torch
import torch.nn.functional as F
from support.models.trace import Toy, tokens, vectors
from torch import nn

from autopipe.errors import TraceError
from autopipe.ir.tensor import evaluate
from autopipe.trace import capture, strategies
from autopipe.trace.explain import MORE_CALLS
from autopipe.trace.sizes.align import GraphsDiffer
from autopipe.trace.sizes.lengths import Length, found_lengths, other_lengths, shorter, spread
from autopipe.trace.sizes.symbolic_sizes import Size


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (lambda b, t: b, "s0"),
        (lambda b, t: 16 * b, "s0*16"),
        (lambda b, t: 3 * b - 1, "s0*3-1"),
        (lambda b, t: b * b, "s0*s0"),
        (lambda b, t: t, "s1"),
        (lambda b, t: t - 1, "s1-1"),
        (lambda b, t: 4 * t + 2, "s1*4+2"),
        (lambda b, t: b * t, "s0*s1"),
        (lambda b, t: b * (t - 1), "s0*(s1-1)"),
        (lambda b, t: b * t * 8, "s0*s1*8"),
        (lambda b, t: t * t, "s1*s1"),
        (lambda b, t: b * t * t, "s0*s1*s1"),
    ],
)
def test_an_expression_is_found_from_two_shapes(number, text):
    narrow, wide = (5, 33), (132, 33 + 97)
    size = Size.through((narrow, number(*narrow)), (wide, number(*wide)))
    assert str(size) == text
    for batch, length in ((1, 2), (7, 64), (3, 8)):
        assert evaluate(str(size), {"s0": batch, "s1": length}) == number(batch, length)


@pytest.mark.parametrize("size", range(5, 140, 3))
@pytest.mark.parametrize("multiple", [2, 4, 8, 16, 64])
def test_a_rounded_length_is_not_linear(size, multiple):
    for other in other_lengths(size, {2 * size, 3 * size}):
        for rounded in (lambda n: -(-n // multiple) * multiple, lambda n: n // multiple, lambda n: n // multiple + 3):
            if rounded(size) != rounded(other):
                with pytest.raises(GraphsDiffer):
                    Size.through(((5, size), rounded(size)), ((132, other), rounded(other)))


@pytest.mark.parametrize("size", [5, 8, 12, 16, 30, 33, 64, 120, 128, 500, 512, 2048])
def test_a_guessed_length_is_recorded_at_sizes_that_differ_in_most_divisors(size):
    first, *_ = other_lengths(size, {size, 1024})
    alike = [number for number in range(2, 9) if (first % number == 0) == (size % number == 0)]
    assert len(alike) <= 2 and not {2, 3} & {*alike}


@pytest.mark.parametrize("count", [1, 2, 5, 16])
def test_sizes_of_the_data_are_recorded_where_their_divisors_differ(count):
    ones, odd = spread([Length((), 5, 40, 2)] * count)
    assert all(large % number == 0 for large in ones[1] for number in range(2, 9))
    for small, large in zip(*odd, strict=True):
        assert [n for n in (2, 3, 4, 5, 7, 8) if (small % n == 0) == (large % n == 0)] == []


@pytest.mark.parametrize("number", range(2, 9))
def test_sizes_stay_fixed_if_the_model_asks_for_multiples(number):
    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(8, 4)

        def forward(self, x):
            return self.a(x).mean() * (2 if x.shape[1] % number == 0 else 1)

    def of_length(length):
        return Toy(Asks, lambda n, g: {"x": torch.randn(n, length, 8, generator=g)})

    others = [of_length(length).example_item(5) for length in (11, 13)]
    assert capture(of_length(23), batch_size=5, others=others).graph.lengths == ()


def test_lengths_are_the_second_dimension_of_integers_and_equal_sizes():
    model = nn.Linear(16, 16)
    ids, mask = torch.zeros(5, 9, dtype=torch.int64), torch.ones(5, 1, 9, 9)
    (length,) = found_lengths(model, {"ids": ids, "mask": mask, "table": torch.zeros(9, 2)}, {"ids": 0, "mask": 0}, 5)
    assert length.size == 9
    assert length.places == (("ids", 1), ("mask", 2), ("mask", 3), ("table", 0))


def test_features_have_no_length_and_sequences_of_vectors_have_one():
    model = nn.Linear(16, 16)
    assert found_lengths(model, {"x": torch.zeros(5, 16)}, {"x": 0}, 5) == ()
    assert found_lengths(model, {"x": torch.zeros(5, 16, 3), "y": torch.zeros(5)}, {"x": 0, "y": 0}, 5) == ()
    (length,) = found_lengths(model, {"x": torch.zeros(5, 30, 16)}, {"x": 0}, 5)
    assert length.places == (("x", 1),)
    assert found_lengths(model, {"x": torch.zeros(5, 3, 32, 32)}, {"x": 0}, 5) == ()  # images are captured per size


def test_the_shortest_batch_of_the_data_comes_first():
    assert shorter(64) == (2, 16, 48)
    assert shorter(4) == (2, 3)


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.out = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 20)

    def hidden(self, ids):
        batch, length = ids.shape
        return torch.tanh(self.mix(self.embed(ids).reshape(batch * length, 8))).view(batch, length, 8)

    def forward(self, ids):
        h = self.hidden(ids)
        return F.cross_entropy(self.out(h[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def test_a_length_is_symbolic_up_to_the_compared_length():
    captured = capture(Toy(Sequence, tokens))
    assert captured.exact
    assert captured.method == "calls of the model, at two batch sizes and lengths"
    batch, length = captured.graph.symbols
    assert (length.name, length.input, length.dimension, length.hint, length.low) == ("s1", "ids", 1, 9, 2)
    assert length.high >= 36 and length.holds(36) and not length.holds(1) and batch.holds(10**6)
    shapes = {node.name: node.spec.shape for node in captured.graph.nodes if node.spec is not None}
    assert ("s0", "s1", 8) in shapes.values() and ("s0*(s1-1)", 20) in shapes.values()
    assert not any(" 9" in node.arguments for node in captured.graph.nodes)


class Table(Sequence):
    """The positions end with the table, so no longer batch can be tried."""

    def __init__(self, length):
        super().__init__()
        self.places = nn.Parameter(torch.randn(length, 8))

    def hidden(self, ids):
        return self.embed(ids) + self.places[: ids.shape[1]]


@pytest.mark.parametrize(("length", "high"), [(9, 9), (26, 26), (27, 26), (100, 40)])
def test_a_length_is_bounded_by_the_size_of_a_lookup_table(length, high):
    captured = capture(Toy(lambda: Table(length), tokens))
    assert captured.exact
    assert (captured.graph.symbols[1].low, captured.graph.symbols[1].high) == (2, high)


class Padded(Sequence):
    def hidden(self, ids):
        h = self.embed(F.pad(ids, (0, -ids.shape[1] % 8)))
        return self.mix(h)[:, : ids.shape[1]]


class Unrolled(Sequence):
    def hidden(self, ids):
        state, states = torch.zeros(len(ids), 8), []
        for t in range(ids.shape[1]):
            state = torch.tanh(self.mix(state) + self.embed(ids[:, t]))
            states.append(state)
        return torch.stack(states, 1)


class Long(Sequence):
    """Uses another path from some length on."""

    def hidden(self, ids):
        h = self.embed(ids)
        return self.mix(h) if ids.shape[1] < 20 else torch.tanh(self.mix(h))


class Flat(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(20, 8), nn.Linear(72, 3)

    def forward(self, ids):
        return self.out(self.embed(ids).flatten(1)).pow(2).mean()


@pytest.mark.parametrize("model", [Padded, Unrolled, Long, Flat], ids=lambda model: model.__name__)
def test_a_model_whose_calls_depend_on_the_length_keeps_the_captured_length(model):
    captured = capture(Toy(model, tokens))
    assert captured.exact
    assert [symbol.name for symbol in captured.graph.symbols] == ["s0"]
    assert captured.graph.inputs[0].spec.shape == ("s0", 9)


def test_a_length_that_no_shorter_batch_confirms_is_rejected():
    """Labels point beyond the end of a shorter batch, on which the model itself fails."""

    class Spans(Sequence):
        def forward(self, ids, end):
            return F.cross_entropy(self.hidden(ids).sum(-1), end)

    def batch(n, generator):
        return {**tokens(n, generator), "end": torch.full((n,), 8)}

    captured = capture(Toy(Spans, batch))
    assert captured.exact
    assert [symbol.name for symbol in captured.graph.symbols] == ["s0"]


def test_source_and_target_have_separate_lengths():
    class Both(Sequence):
        def forward(self, source, ids):
            memory = self.hidden(source)
            h = self.hidden(ids)
            h = h + F.softmax(h @ memory.transpose(1, 2), -1) @ memory
            return F.cross_entropy(self.out(h).flatten(0, 1), ids.flatten())

    def batch(n, generator):
        return {"source": torch.randint(1, 20, (n, 13), generator=generator), **tokens(n, generator)}

    captured = capture(Toy(Both, batch))
    assert captured.exact
    assert [(s.name, s.input, s.hint) for s in captured.graph.symbols[1:]] == [("s1", "source", 13), ("s2", "ids", 9)]
    assert ("s0", "s2", "s1") in {node.spec.shape for node in captured.graph.nodes if node.spec is not None}


def test_symbolic_lengths_can_be_disabled():
    captured = capture(Toy(Sequence, tokens), lengths=False)
    assert captured.method == "calls of the model, at two batch sizes"
    assert len(captured.graph.symbols) == 1


def test_evaluation_mode_can_be_captured_separately():
    class Dropping(Sequence):
        def hidden(self, ids):
            h = super().hidden(ids)
            return h * (torch.rand(len(ids), 1, 1) > 0.5) if self.training else h

    work = Toy(Dropping, tokens)
    model = work.build_model()
    training, evaluation = capture(work, model=model), capture(work, model=model, training=False)
    assert "eval mode traces differently" in training.evaluation_note
    assert evaluation.exact and evaluation.evaluation_note == ""
    assert len(evaluation.graph.nodes) < len(training.graph.nodes)
    assert model.training and all(part.training for part in model.modules())


def test_inputs_that_may_be_vectors_keep_their_size():
    captured = capture(Toy(lambda: nn.Sequential(nn.Linear(4, 4)), lambda n, g: {"input": vectors(n, g)["x"]},
                           loss=lambda output, item: output.pow(2).mean()))  # fmt: skip
    assert len(captured.graph.symbols) == 1


def test_a_loop_over_the_sequence_is_abandoned_at_its_first_extra_iteration(monkeypatch):
    passes = []
    original = strategies.follow

    def follow(*arguments, **options):
        try:
            return original(*arguments, **options)
        except TraceError as error:
            passes.append(error.what)
            raise

    monkeypatch.setattr(strategies, "follow", follow)
    capture(Toy(Unrolled, tokens), verify=False)
    assert passes == [MORE_CALLS]
