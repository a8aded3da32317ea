"""Hugging Face's ``num_items_in_batch``: the loss divides by a number of the minibatch, which the batch holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.oracle import load
from support.pipelines import build, captured_file, plan_for

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")

MODEL = """
import torch, transformers


def build_model():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, hidden_size=16, use_cache=False,
        num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, max_position_embeddings=16))


def optimizer(named_parameters):
    return torch.optim.SGD([parameter for _, parameter in named_parameters], lr=0.5)


def data(batch_size=6):
    g = torch.Generator().manual_seed(3)
    for step in range(3):
        ids = torch.randint(0, 64, (batch_size, 12), generator=g)
        labels = ids.clone()
        for row in range(batch_size):  # so that no two microbatches have as many labels
            labels[row, : 2 * row + step] = -100
        yield dict(input_ids=ids, labels=labels, num_items_in_batch=%s)
"""


@pytest.mark.parametrize("count", ["(labels[:, 1:] != -100).sum()", "(labels[:, 1:] != -100).sum().item()", "None"])
def test_microbatches_take_the_step_of_the_complete_batch(count: str, tmp_path: Path) -> None:
    path = tmp_path / "llama.py"
    path.write_text(MODEL % count)
    subject = captured_file(path)
    pipeline = build(subject, plan_for(subject, 2, "1f1b", 3, 6), tmp_path / "run")
    trained = pipeline.weights(pipeline.train(list(subject.workload.items())))
    module = load(path)
    torch.manual_seed(0)
    model = module.build_model()
    optimizer = module.optimizer(list(model.named_parameters()))
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    for item in module.data():
        model(**item).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in model.named_parameters():
        torch.testing.assert_close(trained[name], value, rtol=1e-4, atol=1e-6)
        assert not torch.allclose(before[name], value, rtol=1e-4, atol=1e-6), name
