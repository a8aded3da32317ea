"""Models that exceed this machine's memory are refused with their size before their weights are allocated."""

import subprocess
import sys
import textwrap

import pytest
import torch

from autopipe.errors import ModelFileError
from autopipe.workload import LoadOptions, Workload
from autopipe.workload.model import size_limits as room
from autopipe.workload.model.size_limits import build_within_memory, loading_within_memory

# four layers of 1 KiB of weights each, and no bias
MODEL = """
import torch
from torch import nn

BUILT = []

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(4):
            self.layers.append(nn.Linear(16, 16, bias=False))
            if not self.layers[-1].weight.is_meta:
                BUILT.append(self.layers[-1].weight.nbytes)
            {each}
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

def build_model():
    return Net()
"""
KIB = 1024


@pytest.fixture
def loaded(tmp_path, monkeypatch):
    def load(each="pass", end="", first=KIB, available=None):
        monkeypatch.setattr(room, "FIRST_BYTES", first)
        if available is not None:
            monkeypatch.setattr(room, "available_bytes", lambda: available)
        (tmp_path / "net.py").write_text(MODEL.format(each=each) + end)
        return Workload(LoadOptions(str(tmp_path / "net.py")).spec())

    return load


def built(workload):
    return workload.builder.value.__globals__["BUILT"]


@pytest.mark.parametrize(("verify", "needed"), [(True, 16 * KIB), (False, 4 * KIB)])
def test_a_model_is_refused_only_if_it_exceeds_the_memory(loaded, verify, needed):
    workload = loaded(available=needed - 1)
    with pytest.raises(ModelFileError, match=r"net\.py:build_model does not fit this machine") as caught:
        build_within_memory(workload, verify=verify, remedy="another way")
    assert built(workload) == [KIB], "only what is tried first was made"
    assert "0.00e9 parameters" in caught.value.what
    assert ("to verify it" in caught.value.what) == verify
    assert caught.value.remedy == "another way"

    workload = loaded(available=needed)
    model = build_within_memory(workload, verify=verify, remedy="")
    for ours, plain in zip(model.parameters(), workload.build_model().parameters(), strict=True):
        assert torch.equal(ours, plain)


def test_a_small_model_is_built_once(loaded):
    workload = loaded(first=4 * KIB, available=2**40)
    build_within_memory(workload, verify=True, remedy="")
    assert len(built(workload)) == 4


def test_parameters_replaced_during_the_build_are_counted_once(loaded):
    replaced = "self.layers[-1].weight = nn.Parameter(self.layers[-1].weight.detach().clone())"
    workload = loaded(replaced, first=5 * KIB, available=2**40)
    build_within_memory(workload, verify=True, remedy="")
    assert len(built(workload)) == 4


def test_a_build_that_reads_its_weights_is_stopped_at_the_limit(loaded):
    workload = loaded("self.layers[-1].weight.sum().item()", available=12 * KIB)
    with pytest.raises(ModelFileError, match="its parameters take more than") as caught:
        build_within_memory(workload, verify=True, remedy="another way")
    assert caught.value.remedy == "another way"
    assert len(built(workload)) == 1 + 3
    workload = loaded("self.layers[-1].weight.sum().item()", available=16 * KIB)
    assert len(list(build_within_memory(workload, verify=True, remedy="").parameters())) == 4


def test_a_model_built_at_import_is_refused(loaded, tmp_path):
    with pytest.raises(ModelFileError, match="its parameters take more than"), loading_within_memory("net.py", ""):
        loaded(end="\nmodel = Net()\n")
        torch.nn.Linear(2**20, 2**20, device="meta")  # allocates nothing
        torch.nn.Parameter(torch.empty(0))
        torch.nn.Module().register_parameter("huge", torch.nn.Parameter(torch.empty(1).expand(2**50)))
    workload = loaded(end="\nmodel = Net()\n", available=15 * KIB)
    with pytest.raises(ModelFileError, match="does not fit this machine"):
        build_within_memory(workload, verify=True, remedy="")


def test_a_limit_set_by_the_shell_counts():
    script = textwrap.dedent("""
        import resource
        from autopipe.workload.model.size_limits import available_bytes
        before = available_bytes()
        vms = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (vms + 2**20, resource.RLIM_INFINITY))
        assert available_bytes() <= 2**20 < before
    """)
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
