"""A stage file is the code that runs: it adopts the model, in a new process, from any folder, and is never stale."""

import functools
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from support.chain import even_cuts, load, plan_of
from support.models.trace import Toy, vectors, workload
from support.pipelines import captured_file
from torch import nn

from autopipe.errors import ArtifactError
from autopipe.generate import generate, load_constants, load_stage
from autopipe.stage import Stage
from autopipe.trace import capture

ROOT = Path(__file__).resolve().parents[3]


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x.logsumexp(dim=-1).mean()


@functools.cache
def small():
    return capture(Toy(Chain, vectors), verify=False)


class Awkward(nn.Module):
    """Names that a stage uses itself, names that are not identifiers, and a tensor without a name."""

    def __init__(self):
        super().__init__()
        self.train_ = nn.Linear(4, 4)
        self._modules["place"] = nn.Linear(4, 4)
        self.parts = nn.ModuleDict({"a-b": nn.Linear(4, 4), "1": nn.Linear(4, 4), "class_": nn.Linear(4, 4)})
        self.frozen = nn.BatchNorm1d(4)
        self._buffers["seed"] = torch.ones(4)

    def train(self, mode=True):
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x):
        lambda_ = self._modules["place"](x) * self._buffers["seed"]
        x = self.parts["class_"](lambda_)
        x = self.parts["a-b"](x) + self.parts["1"](x)
        return self.frozen(self.train_(x)).pow(2).mean()


def test_names_of_the_model_do_not_collide_with_names_of_a_stage(tmp_path):
    work = Toy(Awkward, vectors)
    traced = capture(work, verify=False)
    model, plain = work.build_model(), work.build_model()
    stages = load(traced, plan_of(traced.graph, []), tmp_path, model)
    item = work.example_item(3)
    assert torch.equal(stages[0](item["x"])[0], plain(item["x"]))
    assert sorted(stages[0].state_dict()) == sorted(model.state_dict())


def test_modules_in_evaluation_mode_stay_in_it(tmp_path):
    work = Toy(Awkward, vectors)
    traced = capture(work, verify=False)
    (stage,) = load(traced, plan_of(traced.graph, []), tmp_path, work.build_model())
    stage.eval()
    stage.train()
    assert stage.training and stage.train_.training and not stage.frozen.training


def test_a_buffer_with_two_names_stays_one_tensor_when_the_stage_moves():
    class Two(Stage):
        BUFFERS = ("a.table", "b.table")

    model = nn.Module()
    table = torch.ones(3)
    for name in ("a", "b"):
        model.add_module(name, nn.Module())
        model.get_submodule(name).register_buffer("table", table, persistent=False)
    stage = Two.adopt(model, {}).place(torch.device("meta"))
    assert stage.a.table is stage.b.table
    assert stage.a.table.is_meta
    assert stage.state_dict() == {}


def test_adopting_another_model_names_what_it_lacks():
    class Wants(Stage):
        INDEX = 2
        MODULES = ("encoder.first",)
        CONSTANTS = ("constant_mask",)

    with pytest.raises(ArtifactError) as raised:
        Wants.adopt(nn.Module(), {"constant_mask": torch.ones(1)})
    assert raised.value.what == "stage 2 was written for a model with encoder.first, which this model does not have"
    assert raised.value.remedy == "autopipe generate"


def files(folder, num_stages=2):
    traced = small()
    plan = plan_of(traced.graph, even_cuts(traced.graph, num_stages))
    generate(traced, plan, folder)
    return plan


def test_a_plan_with_fewer_stages_leaves_no_old_files(tmp_path):
    files(tmp_path, 3)
    (tmp_path / "notes.txt").write_text("mine")
    files(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "stage_0.py", "stage_1.py"]


def test_constants_are_written_next_to_the_files_and_removed_when_unused(tmp_path):
    traced = capture(workload("plain tensors"), verify=False)
    generate(traced, plan_of(traced.graph, []), tmp_path)
    assert sorted(load_constants(tmp_path)) == sorted(traced.constants)
    for name, tensor in load_constants(tmp_path).items():
        assert torch.equal(tensor, traced.constants[name])
    (tmp_path / "constants.safetensors").write_bytes(b"broken")
    with pytest.raises(ArtifactError, match=r"constants\.safetensors is damaged"):
        load_constants(tmp_path)
    files(tmp_path)
    assert load_constants(tmp_path) == {}


@pytest.mark.parametrize("kind", ("model", "plan"))
def test_a_stale_file_is_refused_with_both_digests_and_the_command(kind, tmp_path):
    plan = files(tmp_path)
    digests = {"graph_digest": plan.graph_digest, "plan_digest": plan.digest}
    was = digests["graph_digest" if kind == "model" else "plan_digest"]
    digests["graph_digest" if kind == "model" else "plan_digest"] = "0123456789abcdef"
    with pytest.raises(ArtifactError) as raised:
        load_stage(tmp_path, 1, **digests)
    assert raised.value.what == f"the file of stage 1 was written for {kind} {was}; this is {kind} 0123456789abcdef"
    assert raised.value.where == str(tmp_path / "stage_1.py")
    assert raised.value.remedy == "autopipe generate"


def test_a_missing_or_broken_file_is_refused_with_the_command(tmp_path):
    plan = files(tmp_path)
    digests = {"graph_digest": plan.graph_digest, "plan_digest": plan.digest}
    with pytest.raises(ArtifactError, match="the file of stage 7 does not exist"):
        load_stage(tmp_path, 7, **digests)
    path = tmp_path / "stage_0.py"
    path.write_text(path.read_text() + "\nimport no_such_module\n")
    with pytest.raises(ArtifactError, match="cannot be run: ModuleNotFoundError: No module named 'no_such_module'"):
        load_stage(tmp_path, 0, **digests)


def test_a_file_rewritten_within_one_clock_tick_is_the_code_that_runs(tmp_path):
    plan = files(tmp_path)
    digests = {"graph_digest": plan.graph_digest, "plan_digest": plan.digest}
    path = tmp_path / "stage_0.py"
    before = path.stat()
    load_stage(tmp_path, 0, **digests)
    path.write_text(path.read_text().replace("INDEX = 0", "INDEX = 9"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert load_stage(tmp_path, 0, **digests).INDEX == 9
    assert not list(tmp_path.rglob("*.pyc"))


def test_the_capture_of_another_model_is_refused_with_both_digests(tmp_path):
    traced = small()
    other = capture(workload("plain"), verify=False)
    with pytest.raises(ArtifactError) as raised:
        generate(other, plan_of(traced.graph, []), tmp_path)
    assert traced.graph.digest in raised.value.what and other.graph.digest in raised.value.what


def test_stages_run_in_a_new_process_that_has_loaded_the_users_file(tmp_path):
    user = tmp_path / "user" / "ste_model.py"
    user.parent.mkdir()
    user.write_text(
        textwrap.dedent("""\
            import torch
            from torch import nn

            class Sign(torch.autograd.Function):
                @staticmethod
                def forward(ctx, x):
                    return x.sign()

                @staticmethod
                def backward(ctx, gradient):
                    return gradient

            class Model(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 1)

                def forward(self, x):
                    x = Sign.apply(self.a(x))
                    return self.b(x).pow(2).mean()

            def example_inputs(batch_size):
                return {"x": torch.ones(batch_size, 4)}
            """)
    )
    subject = captured_file(user)
    plan = plan_of(subject.capture.graph, even_cuts(subject.capture.graph, 2))
    generate(subject.capture, plan, tmp_path / "stages")
    assert "from ste_model import Sign" in (tmp_path / "stages" / "stage_0.py").read_text()
    code = textwrap.dedent(f"""\
        from pathlib import Path
        import torch
        from autopipe.generate import load_stage
        from autopipe.workload import LoadOptions, load_workload
        model = load_workload(LoadOptions({str(user)!r})).build_model()
        digests = dict(graph_digest={plan.graph_digest!r}, plan_digest={plan.digest!r})
        value = torch.ones(2, 4)
        for index in range(2):
            stage = load_stage(Path({str(tmp_path / "stages")!r}), index, **digests).adopt(model, {{}})
            (value,) = stage(value)
        value.backward()
        print(bool(torch.equal(value, model(torch.ones(2, 4)))), model.a.weight.grad.abs().sum().item() > 0)
        """)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split() == ["True", "True"]
