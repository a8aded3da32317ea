"""Estimated profiles, compared with measured ones and with arithmetic by hand."""

import importlib
import json
import textwrap

import pytest
from click.testing import CliRunner
from support.measuring.stacks import stack_of

from autopipe.cli.main import autopipe
from autopipe.ir import artifact
from autopipe.ir.profile import COUNTED, Profile
from autopipe.measure import estimate, measure
from autopipe.planning.cost.datasheets import COMPUTE_EFFICIENCY, datasheet, on_datasheet
from autopipe.trace import capture
from autopipe.workload import LoadOptions, Workload

estimate_module = importlib.import_module("autopipe.measure.estimate")  # the package has a function of this name


def bytes_of(cost):
    return cost.output_bytes, cost.saved_bytes, cost.workspace_bytes


@pytest.mark.parametrize("on_meta", [False, True])
def test_an_estimate_counts_what_a_measurement_counts(on_meta):
    model, traced, workload = stack_of()
    measured = measure(traced, workload, device="cpu", microbatch_sizes=(2, 5))
    if on_meta:
        model.to("meta")
    counted = estimate(traced, workload, microbatch_sizes=(2, 5))
    for ours, theirs in zip(counted.measurements, measured.measurements, strict=True):
        assert ours.microbatch_size == theirs.microbatch_size
        assert {name: bytes_of(cost) for name, cost in ours.costs.items()} == {
            name: bytes_of(cost) for name, cost in theirs.costs.items()
        }
        assert ours.work == theirs.work
        assert ours.keepers == theirs.keepers
        assert {cost.forward_seconds + cost.backward_seconds for cost in ours.costs.values()} == {0.0}
    assert counted.optimizer_bytes_per_byte == pytest.approx(measured.optimizer_bytes_per_byte, rel=0.2)
    assert (counted.device.kind, counted.optimizer_seconds_per_byte) == (COUNTED, 0.0)


LLAMA = """
import torch, transformers

def build_model():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32000, hidden_size=512, use_cache=False,
        num_hidden_layers=8, num_attention_heads=8, intermediate_size=2048, max_position_embeddings=2048))

def data(batch_size=8):
    ids = torch.zeros(batch_size, 512, dtype=torch.long)
    return [{"input_ids": ids, "labels": ids}]
"""


def test_the_estimate_of_a_llama_on_h100_equals_arithmetic_by_hand(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "llama.py").write_text(LLAMA)
    workload = Workload(LoadOptions(str(tmp_path / "llama.py"), precision="bf16").spec())
    model = workload.build_model(empty=True)
    traced = capture(workload, model=model, verify=False, lengths=False)
    counted = estimate(traced, workload, microbatch_sizes=(8,))
    weights, tokens, layers, width, length = sum(p.numel() for p in model.parameters()), 8 * 512, 8, 512, 512
    assert 66e6 < weights < 68e6
    flops = sum(work.forward.flops + work.backward.flops for work in counted.measurements[0].work.values())
    # 6 operations per token and multiplied weight; the embedding is a lookup. Attention: per token two products of
    # length x width forward, and five backward
    assert flops == pytest.approx(
        6 * (weights - 32000 * width) * tokens + layers * 14 * length * width * tokens, rel=0.01
    )

    # by hand, as for any transformer: 6 operations per token and weight at 40 % of the peak of four devices, 1.0 ms
    by_hand = 6 * weights * tokens / (4 * 0.4 * 989.5e12)
    assert by_hand == pytest.approx(1.0e-3, rel=0.1)
    priced = on_datasheet(counted, datasheet("H100-SXM"), "bf16").measurements[0].costs.values()
    seconds = sum(cost.forward_seconds + cost.backward_seconds for cost in priced) / 4
    # at least the arithmetic at the efficiency of a product; at most twice the time by hand, because such a narrow
    # model is bound by memory: logits of 32000 words for each token, and activations 512 wide
    assert flops / (4 * COMPUTE_EFFICIENCY * 989.5e12) < seconds < 2 * by_hand


NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x

def build_model():
    return Net()

def loss(output, target):
    return (output - target).square().mean()

def data(batch_size=8):
    return [(torch.ones(batch_size, 64), torch.ones(batch_size, 64))] * 4
"""


def test_a_model_that_does_not_fit_can_be_estimated_and_planned(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(textwrap.dedent(NET))
    monkeypatch.setattr("autopipe.workload.model.size_limits.available_bytes", lambda: 60_000)

    def run(*words, code=0):
        done = CliRunner().invoke(autopipe, words)
        assert done.exit_code == code, done.output
        return done

    refused = " ".join(run("profile", "net.py", "--device", "cpu", code=1).stderr.split())
    assert "net.py:build_model does not fit this machine: 0.00e9 parameters" in refused
    assert "autopipe profile TARGET --estimate" in refused
    shown = run("profile", "net.py")
    assert "net.py:build_model does not fit this machine: 0.00e9 parameters" in " ".join(shown.stderr.split())
    planned = ("plan", "net.py", "--gpus", "2", "--device-name", "H100", "--work-dir", "fresh")
    assert "nothing was timed" in " ".join(run(*planned).stderr.split())
    assert "counted: nothing was timed" in shown.stdout
    assert artifact.load(Profile, tmp_path / ".autopipe/profile.json", renew="").batch_size == 8
    text = " ".join(run("plan", "--gpus", "2", code=1).stderr.split())
    assert "has no times, because it was taken with --estimate try: name the device to plan for: --device-name" in text
    document = json.loads(run("plan", "--gpus", "2", "--device-name", "H100", "--replicas", "never", "--json").stdout)
    assert document["predicted"]["step_seconds"] > 0
    assert "operations and bytes counted on tensors without data" in document["estimate"]
    for words, what in ((("--links",), "--links and --estimate"), (("--device", "cpu"), "--device and --estimate")):
        assert f"{what} exclude each other" in run("profile", "net.py", "--estimate", *words, code=2).stderr
    # once it fits, training measures it first
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    trained = run("profile", "net.py", "--microbatch-sizes", "1")
    assert "forward" in trained.stdout


@pytest.mark.parametrize(("flops", "counted"), [(1e13, [2, 4, 16]), (0.0, [2, 4])])
def test_of_larger_sizes_the_largest_with_few_operations_is_counted(flops, counted, monkeypatch):
    _, traced, workload = stack_of()
    monkeypatch.setattr(estimate_module, "QUICK_FLOPS", flops)
    profile = estimate(traced, workload, microbatch_sizes=(2, 4), larger_sizes=(3, 8, 16))
    assert [measurement.microbatch_size for measurement in profile.measurements] == counted
