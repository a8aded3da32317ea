"""One run of the model and one of the graph prove a capture; a graph that computes something else is seen by them."""

import copy
import dataclasses

import pytest
import torch
from support.models.trace import Base, Toy, vectors, workload
from torch import fx

from autopipe.trace import api, capture, two_runs
from autopipe.workload.model import size_limits

NAMES = ("plain", "tied", "checkpoint", "custom function", "nn.Transformer")


def scaled(graph):
    """Multiply the last value of a call by 1.002."""
    nodes = [node for node in graph.nodes if node.op == "call_module" and node.users]
    node = nodes[-1]
    with graph.inserting_after(node):
        product = graph.call_function(torch.mul, (node, 1.002))
    node.replace_all_uses_with(product, delete_user_cb=lambda user: user is not product)
    product.meta = {**node.meta, "random": (0, 0)}


def detached(graph):
    """Cut the gradient of the first value of a call."""
    node = next(node for node in graph.nodes if node.op == "call_module" and node.users)
    with graph.inserting_after(node):
        value = graph.call_method("detach", (node,))
    node.replace_all_uses_with(value, delete_user_cb=lambda user: user is not value)
    value.meta = {**node.meta, "random": (0, 0)}


def redrawn(graph):
    """Give a draw the position of another one."""
    node = next((node for node in graph.nodes if node.meta.get("random", (0, 0))[1]), None)
    if node is None:
        pytest.skip("the model draws nothing")
    first, count = node.meta["random"]
    node.meta["random"] = first + 1, count


def with_graph(captured, change):
    module = fx.GraphModule(captured.module, copy.deepcopy(captured.module.graph))
    for node, original in zip(module.graph.nodes, captured.module.graph.nodes, strict=True):
        node.meta = dict(original.meta)
    change(module.graph)
    return dataclasses.replace(captured, module=module)


def agree(work, model, captured, item):
    return two_runs.num_agreeing(work, model, captured, [(item, True)]) == 1


@pytest.mark.parametrize("change", [scaled, detached, redrawn])
@pytest.mark.parametrize("name", NAMES)
def test_another_graph_is_seen(name, change):
    work = workload(name)
    model, item = work.build_model(), work.example_item(5)
    captured = capture(work, model=model)
    assert agree(work, model, captured, item)
    assert not agree(work, model, with_graph(captured, change), item)


def test_every_sample_has_the_numbers_of_the_whole_batch():
    """With numbers of their own, the parts of a batch with dropout do not add up to it."""
    work = workload("checkpoint")
    model, item = work.build_model(), work.example_item(5)
    captured = capture(work, model=model)
    assert any(node.num_random for node in captured.graph.nodes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(two_runs._PartDraws, "_of_part", lambda draws, whole, shape: torch.ones(shape))
        assert not agree(work, model, captured, item)


def test_a_loss_that_couples_samples_needs_more_runs():
    work = workload("selecting")
    model = work.build_model()
    captured = capture(work, model=model)
    assert not agree(work, model, captured, work.example_item(5))
    assert captured.coupling.error > 0.01


def test_a_capture_computes_two_backwards(monkeypatch):
    """One of the model on a batch of five samples, and one of the graph on its parts."""
    work, sizes = workload("plain"), []
    loss, backward = work.loss, torch.autograd.backward

    def counted(model, item):
        result = loss(model, item)
        if result[0].requires_grad and type(result[0]) is torch.Tensor:
            sizes.append(work.num_samples(item))
        return result

    backwards = []
    monkeypatch.setattr(torch.autograd, "backward", lambda *a, **k: (backwards.append(1), backward(*a, **k))[1])
    monkeypatch.setattr(work, "loss", counted)
    model = work.build_model()
    captured = api.capture(work, model=model, lengths=False)
    assert captured.exact and len(backwards) == 2
    assert sizes[-1] == 5


class Pairs(Base):
    """Each sample reads its neighbour in a pair."""

    def forward(self, x):
        h = self.a(x)
        count = h.shape[0]
        return (h + h[(torch.arange(count) ^ 1).clamp(max=count - 1)]).pow(2).mean()


class Far(Base):
    """The first samples read those after the third."""

    def forward(self, x):
        h = self.a(x)
        return (h + torch.cat([h[3:], h[:3]])).pow(2).mean()


@pytest.mark.parametrize("model", [Pairs, Far])
def test_samples_that_depend_on_few_others_are_seen(model):
    assert capture(Toy(model, vectors)).coupling.error > 0.01


def test_gradients_that_a_model_has_are_left_as_they_are():
    work = workload("plain")
    model = work.build_model()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert capture(work, model=model).exact
    assert all(bool((parameter.grad == 1).all()) for parameter in model.parameters())
    assert agree(work, model, capture(work, model=model), work.example_item(5))


class Words(torch.nn.Module):
    """Predicts the next word."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(11, 6), torch.nn.Linear(6, 11)

    def forward(self, words):
        return self.head(self.embed(words) / 2.0)


class OfBatch(Words):
    """Divides what it computes by a number of the whole batch."""

    def forward(self, words):
        return self.head(self.embed(words) / (words > 0).float().mean())


class Rolled(Words):
    """Adds late words of the sentence two rows before: of itself in a batch of two."""

    def forward(self, words):
        late = torch.nn.functional.pad(self.embed(words)[:, 4:], (0, 0, 0, 4))
        return self.head(self.embed(words) + late.roll(2, 0))


def padded(model):
    """Return a workload of sentences of 16 words. The rest of a row is 0; the first words of a sentence never are."""
    words = 1 + torch.arange(64 * 16).reshape(64, 16) * 7 % 10
    ends = 4 + torch.arange(64) * 5 % 13
    words[torch.arange(16) >= ends[:, None]] = 0

    def loss(output, item):
        return torch.nn.functional.cross_entropy(output.flatten(0, 1), item["words"].flatten())

    return Toy(model, lambda size, _: {"words": words[:size]}, loss)


def test_a_number_of_the_whole_batch_is_seen_although_short_batches_have_no_padding():
    captured = capture(padded(OfBatch))
    assert captured.graph.lengths and captured.coupling.error > 1e-3
    assert capture(padded(Rolled)).coupling.error > 1e-3
    assert capture(padded(Words)).coupling.error == 0


def test_gradients_are_computed_at_the_shortest_length_only(monkeypatch):
    work, shapes, of_backwards = padded(Words), [], []
    loss, backward = work.loss, torch.autograd.backward

    def noted(model, item):
        shapes.append(tuple(item["words"].shape))
        return loss(model, item)

    monkeypatch.setattr(work, "loss", noted)
    monkeypatch.setattr(
        torch.autograd, "backward", lambda *a, **k: (of_backwards.append(shapes[-1]), backward(*a, **k))[1]
    )
    captured = capture(work)
    assert captured.exact and captured.coupling.error == 0
    assert of_backwards == [(5, 2), (5, 2)]  # of the model, and of the graph on the parts
    assert shapes[-1] == (3, 16)


class Cut(Words):
    """The gradient depends on the padding of the whole batch, and the value does not."""

    def __init__(self):
        super().__init__()
        self.head.requires_grad_(False)

    def forward(self, words):
        share = (words == 0).float().mean()
        values = self.embed(words)
        return self.head(values * share + (values * (1 - share)).detach())


def test_a_gradient_that_couples_samples_in_padded_batches_is_seen():
    assert capture(padded(Cut)).coupling.error > 1e-3


def test_a_capture_whose_proof_does_not_fit_into_memory_says_so(monkeypatch):
    work = workload("plain")
    calls, loss = [], work.loss
    monkeypatch.setattr(work, "loss", lambda model, item: (calls.append(1), loss(model, item))[1])
    monkeypatch.setattr(size_limits, "available_bytes", lambda: 10)
    captured = capture(work)
    assert any("is not compared with the original: that needs" in note for note in captured.notes)
    unproven, captured = len(calls), capture(work, verify=False)
    assert len(calls) == 2 * unproven and captured.exact is None
