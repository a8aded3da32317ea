"""Large models are built without their weights, and refused with their size where they must fit this machine."""

import itertools
import mmap
import subprocess
import sys
import textwrap

import pytest
import torch

from autopipe.errors import ModelFileError
from autopipe.workload import LoadOptions, Workload
from autopipe.workload.model import size_limits as room
from autopipe.workload.model.placeholders import has_placeholders, is_placeholder
from autopipe.workload.model.size_limits import TooLargeError, build_within_memory, loading_within_memory

# four layers of 1 KiB of weights each, and no bias
MODEL = """
import torch
from torch import nn

MARK = "_is_placeholder_of_autopipe"
BUILT = []

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(4):
            self.layers.append(nn.Linear(16, 16, bias=False))
            if not hasattr(self.layers[-1].weight, MARK):
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


def test_a_model_that_is_trained_here_is_refused_only_if_it_exceeds_the_memory(loaded):
    workload = loaded(available=4 * KIB - 1)
    with pytest.raises(TooLargeError, match=r"net\.py:build_model does not fit this machine") as caught:
        build_within_memory(workload, whole=True, remedy="another way")
    assert not built(workload), "only what is tried first was made"
    assert "0.00e9 parameters" in caught.value.what
    assert caught.value.remedy == "another way"
    assert has_placeholders(build_within_memory(loaded(available=4 * KIB - 1)))
    assert has_placeholders(build_within_memory(loaded(available=4 * KIB), whole=True))


def test_a_model_that_is_known_to_be_large_is_not_built_completely_first(loaded):
    workload = loaded(available=2**40)
    assert has_placeholders(build_within_memory(workload)) and built(workload)
    built(workload).clear()
    assert has_placeholders(build_within_memory(workload)) and not built(workload)
    workload = loaded(available=2**40)
    assert has_placeholders(build_within_memory(workload, known_bytes=4 * KIB)) and not built(workload)


@pytest.mark.parametrize("each", ["pass", "nn.init.normal_(self.layers[-1].weight)"])
def test_a_large_model_has_random_parameters_that_share_memory(loaded, each):
    workload = loaded(each, available=2**40)
    model = build_within_memory(workload)
    assert len(built(workload)) == 1, "the build stops at the limit"
    weights = list(model.parameters())
    pages = {weight.data_ptr() // mmap.PAGESIZE for weight in weights}
    assert len(weights) == 4 and len(pages) == 1
    assert all(is_placeholder(weight) and weight.requires_grad for weight in weights)
    assert all(0.15 < weight.std() < 0.35 for weight in weights)  # 1 / sqrt(16)
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(weights, 2))
    assert not workload.models.initial.digests and len(workload.models.initial.numbers) == 4


DRAWS = ("torch.rand(2)", "torch.rand(()).item()", "torch.empty(3).normal_()", "torch.randperm(5)")


@pytest.mark.parametrize("draw", DRAWS)
def test_a_large_model_has_what_a_complete_build_draws_for_its_attributes(loaded, draw):
    each = f"self.kept = [*getattr(self, 'kept', ()), {draw}]"
    complete = build_within_memory(loaded(each, first=2**30, available=2**40))
    large = build_within_memory(loaded(each, available=2**40))
    assert has_placeholders(large) and not has_placeholders(complete)
    assert len(large.kept) == 4 and all(map(torch.equal, *(map(torch.as_tensor, m.kept) for m in (large, complete))))


OF_THREADS = """
def drawn():
    values = []
    thread = threading.Thread(target=lambda: values.append(torch.rand(2)))
    thread.start()
    thread.join()
    return values
"""
OF_OWN = """
def drawn():
    nn.init.normal_(nn.Parameter(torch.empty(4, 4)), generator=G)
    values = nn.Linear(4, 4)
    nn.init.normal_(values.weight, generator=G)
    return [torch.tensor(list(G.get_state()[24:200].tolist())).float()]
"""
SEEDED = """
def drawn():
    torch.manual_seed(3)
    nn.Linear(4, 4)
    return []
"""


@pytest.mark.parametrize("drawn", [OF_THREADS, OF_OWN, SEEDED], ids=["a thread", "an own generator", "a seed"])
def test_a_large_model_has_what_other_generators_and_threads_draw(loaded, drawn):
    each = "self.kept = [*getattr(self, 'kept', ()), *drawn(), torch.rand(2)]"
    end = f"\nimport threading\nG = torch.Generator()\n{drawn}"
    models = [build_within_memory(loaded(each, end, first=first, available=2**40)) for first in (2**30, KIB)]
    assert [has_placeholders(model) for model in models] == [False, True]
    assert all(map(torch.equal, *(model.kept for model in models)))


def test_a_large_model_draws_what_only_a_thread_draws(loaded):
    end = f"\nimport threading\n{OF_THREADS}"
    each = "self.kept = [*getattr(self, 'kept', ()), *drawn()]"
    models = [build_within_memory(loaded(each, end, first=first, available=2**40)) for first in (2**30, KIB)]
    assert all(map(torch.equal, *(model.kept for model in models)))


def test_a_build_that_fails_is_not_repeated_for_its_draws(loaded):
    builds = "BUILDS = globals().setdefault('BUILDS', [])"
    workload = loaded("[][1]", f"\n{builds}\nNet.__new__ = lambda cls: (BUILDS.append(1), nn.Module.__new__(cls))[1]\n")
    with pytest.raises(ModelFileError, match="IndexError"):
        build_within_memory(workload, known_bytes=4 * KIB)
    assert len(workload.builder.value.__globals__["BUILDS"]) == 2, "with placeholders, and completely"


def test_a_large_model_draws_nothing_for_its_parameters(loaded):
    each = "self.states = [*getattr(self, 'states', ()), torch.get_rng_state()]"
    states = build_within_memory(loaded(each, available=2**40)).states
    assert all(torch.equal(states[0], state) for state in states)
    states = build_within_memory(loaded(each, first=2**30, available=2**40)).states
    assert not torch.equal(*states[:2])


def test_a_small_model_is_built_once(loaded):
    workload = loaded(first=4 * KIB, available=2**40)
    assert not has_placeholders(build_within_memory(workload))
    assert len(built(workload)) == 4


def test_parameters_replaced_during_the_build_are_counted_once(loaded):
    replaced = "self.layers[-1].weight = nn.Parameter(self.layers[-1].weight.detach().clone())"
    workload = loaded(replaced, first=5 * KIB, available=2**40)
    build_within_memory(workload)
    assert len(built(workload)) == 4


def test_a_build_that_reads_its_weights_is_complete_or_stopped_at_the_limit(loaded):
    workload = loaded("self.layers[0].weight.sum().item()", available=3 * KIB)
    with pytest.raises(ModelFileError, match="its parameters take more memory") as caught:
        build_within_memory(workload, remedy="another way")
    assert caught.value.remedy == "another way"
    assert len(built(workload)) == 3
    workload = loaded("self.layers[0].weight.sum().item()", available=4 * KIB)
    model = build_within_memory(workload)
    assert not has_placeholders(model) and len(list(model.parameters())) == 4


def test_a_model_built_at_import_is_refused(loaded, tmp_path):
    with pytest.raises(ModelFileError, match="its parameters take more"), loading_within_memory("net.py", ""):
        loaded(end="\nmodel = Net()\n")
        torch.nn.Linear(2**20, 2**20, device="meta")  # allocates nothing
        torch.nn.Parameter(torch.empty(0))
        torch.nn.Module().register_parameter("huge", torch.nn.Parameter(torch.empty(1).expand(2**50)))
    workload = loaded(end="\nmodel = Net()\n", available=4 * KIB - 1)
    with pytest.raises(ModelFileError, match="does not fit this machine"):
        build_within_memory(workload)


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
