"""Operations and bytes, counted while nodes run, compared with arithmetic by hand."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopipe.ir.profile import PassWork
from autopipe.measure.work import WorkCounter

FLOAT = 4


def counts(function, *inputs):
    """Return the work of a forward and of its backward."""
    with WorkCounter() as ahead:
        result = function(*inputs)
    gradient = torch.ones_like(result)
    with WorkCounter() as behind:
        result.backward(gradient)
    return ahead.counted, behind.counted


def test_a_linear_layer_multiplies_once_forward_and_twice_backward():
    layer, x = nn.Linear(64, 32), torch.randn(128, 64, requires_grad=True)
    forward, backward = counts(layer, x)
    assert forward == PassWork(2 * 128 * 64 * 32, FLOAT * (128 * 64 + 64 * 32 + 32 + 128 * 32), 0, kernels=1)
    assert backward.flops == 2 * forward.flops


@pytest.mark.parametrize("causal", [True, False])
def test_attention_is_counted_for_every_kernel(causal):
    q = torch.randn(2, 4, 128, 32, requires_grad=True)
    forward, backward = counts(lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=causal), q)
    product = 2 * 2 * 4 * 128 * 128 * 32
    assert forward.flops == 2 * product
    assert backward.flops == 5 * product  # four products, and one recomputed
    assert (forward.repeated_flops, backward.repeated_flops) == (0, product)


def test_attention_with_grouped_queries_computes_as_many_products():
    key = torch.randn(2, 2, 128, 32)

    def attend(q: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, key, key, enable_gqa=True)

    forward, backward = counts(attend, torch.randn(2, 4, 128, 32, requires_grad=True))
    product = 2 * 2 * 4 * 128 * 128 * 32
    assert (forward.flops, backward.flops) == (2 * product, 5 * product)


def test_recurrent_layers_are_counted():
    x = torch.randn(5, 3, 16)
    lstm = nn.LSTM(16, 32)
    forward, backward = counts(lambda x: lstm(x)[0], x)
    assert forward.flops == 2 * 5 * 3 * 4 * 32 * (16 + 32)
    assert backward.flops == 2 * forward.flops


def test_a_convolution_is_counted():
    layer, x = nn.Conv2d(3, 8, 3), torch.randn(2, 3, 10, 10, requires_grad=True)
    forward, backward = counts(layer, x)
    assert forward.flops == 2 * 2 * 8 * 8 * 8 * 27
    assert backward.flops == 2 * forward.flops


def test_views_move_nothing_and_elementwise_operations_their_operands():
    x = torch.randn(100, requires_grad=True)
    with WorkCounter() as views:
        x.view(10, 10).transpose(0, 1).unsqueeze(0).detach()
    assert views.counted == PassWork()
    with WorkCounter() as added:
        x + x.detach().expand(3, 100)
    assert added.counted == PassWork(0, 0, FLOAT * (100 + 100 + 300), kernels=1)


def test_a_lookup_reads_the_rows_that_it_returns():
    table, rows = nn.Embedding(100_000, 8), torch.arange(5)
    with WorkCounter() as looked_up:
        table(rows)
    assert looked_up.counted == PassWork(0, 0, 2 * FLOAT * 5 * 8 + 8 * 5, kernels=1)


def test_a_transformer_layer_has_the_operations_of_its_formula():
    width, tokens, samples = 64, 32, 3
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
    x = torch.randn(samples, tokens, width, requires_grad=True)
    forward, backward = counts(layer, x)
    # 12 width^2 weights in products, and two products of tokens x tokens in attention
    assert forward.flops == samples * tokens * (2 * 12 * width**2 + 4 * tokens * width)
    assert 2 * forward.flops <= backward.flops <= 2.2 * forward.flops
