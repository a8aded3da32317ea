"""Tensors that helpers cache across calls: constants of the graph, and never left fake."""

import functools

import torch
from support.models.trace import Base, Toy, vectors

from autopipe.trace import capture


def test_cached_tensors_are_constants_by_value():
    table = torch.arange(4.0)

    class Cached(Base):
        def forward(self, x):
            return (self.a(x) * table).pow(2).mean()

    captured = capture(Toy(Cached, vectors))
    assert [value.tolist() for value in captured.constants.values()] == [[0.0, 1.0, 2.0, 3.0]]
    assert all(type(value) is torch.Tensor for value in captured.constants.values())


@functools.lru_cache
def memoized_table(width):
    return torch.arange(float(width))


cached_tables = {}


class Tables:
    def __init__(self):
        self.table = None

    def get(self):
        if self.table is None:
            self.table = torch.ones(4) * 3
        return self.table


class Caching(Base):
    def __init__(self):
        super().__init__()
        self.tables = Tables()

    def forward(self, x):
        if "scale" not in cached_tables:
            cached_tables["scale"] = torch.full((4,), 2.0)
        return (self.a(x) * memoized_table(4) * cached_tables["scale"] * self.tables.get()).pow(2).mean()


def test_caches_of_helpers_hold_no_fake_tensors_after_a_capture():
    work = Toy(Caching, vectors)
    model = work.build_model()
    assert capture(work, model=model).exact
    assert model.tables.table is None or type(model.tables.table) is torch.Tensor
    assert type(memoized_table(4)) is torch.Tensor
    assert all(type(value) is torch.Tensor for value in cached_tables.values())
    assert capture(work, model=model).exact  # now everything is cached
