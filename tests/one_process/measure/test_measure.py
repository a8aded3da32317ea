"""The content of a profile: bytes, coverage and side effects. Times are not compared with numbers."""

import logging

import pytest
import torch
from support.measuring.saved_bytes import with_saved_bytes
from support.measuring.stacks import SPEC, Stack, Workload, captured, stack_of
from support.pipelines import captured_file
from torch import fx, nn

from autopipe.devices import arguments_on
from autopipe.errors import ProfileError
from autopipe.measure import measure, segment_costs
from autopipe.measure.clock import Clock
from autopipe.measure.device import find_device
from autopipe.measure.measure import SizeMeasurement
from autopipe.measure.piece import Piece, StateCopies


def size_run(capture, workload, size, least_seconds=1e-9):
    batch, clock = workload.example_item(size), Clock(torch.device("cpu"))
    return SizeMeasurement(capture, clock, size, batch, least_seconds=least_seconds)


def independent_saved_bytes(forward, model, *inputs):
    """Count the bytes that one plain forward saves: every memory once, without parameters and buffers."""
    loss, total = with_saved_bytes(lambda: forward(*inputs), (*model.parameters(), *model.buffers()))
    assert loss.requires_grad
    return total


def test_every_node_is_covered_at_every_size_and_nothing_is_negative():
    _, capture, workload = stack_of()
    profile = measure(capture, workload, device="cpu", microbatch_sizes=(4, 2, 4))
    assert [m.microbatch_size for m in profile.measurements] == [2, 4]
    for measurement in profile.measurements:
        assert set(measurement.costs) == {node.name for node in capture.graph.nodes}
        assert sum(cost.forward_seconds for cost in measurement.costs.values()) > 0
        assert sum(cost.backward_seconds for cost in measurement.costs.values()) > 0
        assert measurement.spread >= 0
    assert profile.workload is SPEC and profile.graph is capture.graph
    assert (profile.device.kind, profile.device.threads) == ("cpu", 1) and profile.device.memory_bytes > 0


HOOKED = """
import torch
from torch import nn
from torch.nn.utils import prune, weight_norm

def build_model():
    return nn.Sequential(HOOK, nn.Tanh(), nn.Linear(8, 8))

def data(batch_size):
    while True:
        yield torch.randn(batch_size, 8), torch.randn(batch_size, 8)

loss = nn.MSELoss()
"""


@pytest.mark.parametrize(
    "hook", ["weight_norm(nn.Linear(8, 8))", "prune.random_unstructured(nn.Linear(8, 8), 'weight', 0.5)"]
)
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_layer_whose_weight_a_hook_computes_is_measured(tmp_path, hook):
    (tmp_path / "net.py").write_text(HOOKED.replace("HOOK", hook))
    subject = captured_file(tmp_path / "net.py")
    profile = measure(subject.capture, subject.workload, device="cpu", microbatch_sizes=(2,))
    (layer,) = (node.name for node in subject.capture.graph.nodes if node.target == "0")
    assert profile.measurements[0].costs[layer].backward_seconds > 0


@pytest.mark.parametrize("least_seconds", [1e-9, 10.0])
@pytest.mark.parametrize("size", [2, 3])
def test_saved_bytes_are_those_of_one_plain_forward_for_any_runs(least_seconds, size):
    model, capture, workload = stack_of()
    run = size_run(capture, workload, size, least_seconds)
    measured = run.measurement()
    expected = independent_saved_bytes(model, model, *workload.example_item(size).values())
    assert sum(cost.saved_bytes for cost in measured.costs.values()) == expected


@pytest.mark.parametrize("least_seconds", [1e-9, 10.0])
def test_the_first_node_that_saves_a_value_is_recorded(least_seconds):
    _, capture, workload = stack_of(blocks=1)
    keepers = size_run(capture, workload, 3, least_seconds).measurement().keepers
    names = [node.name for node in capture.graph.nodes]
    expected = {
        "x": "first",  # a layer saves its input
        "first": "blocks_0_norm",
        "blocks_0_norm": "blocks_0_up",
        "relu": "relu",  # it saves its result; the next layer saves the same memory
        "add": "batch_norm",  # a sum saves nothing
        "batch_norm": "head",
        "sub": "square",
    }
    assert keepers == expected, names


def test_output_bytes_are_those_of_the_values():
    _, capture, workload = stack_of(width=8)
    costs = measure(capture, workload, device="cpu", microbatch_sizes=(3,)).measurements[0].costs
    assert costs["first"].output_bytes == 3 * 8 * 4
    assert costs["blocks_0_up"].output_bytes == 3 * 16 * 4
    assert costs["mean"].output_bytes == 4


def test_parameters_buffers_gradients_and_random_numbers_are_left_alone():
    model, capture, workload = stack_of()
    model.head.weight.grad = torch.ones_like(model.head.weight)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    measure(capture, workload, device="cpu", microbatch_sizes=(2,))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(model.head.weight.grad, torch.ones_like(model.head.weight))
    assert model.first.weight.grad is None
    assert torch.equal(torch.get_rng_state(), state) and torch.get_num_threads() == threads


def test_equal_blocks_are_timed_once():
    _, capture, workload = stack_of(blocks=12)
    run = size_run(capture, workload, 4, least_seconds=1e-9)
    run.measurement()
    few = size_run(*(stack_of(blocks=3)[1:]), 4, least_seconds=1e-9)
    few.measurement()
    assert len(run.segments.bounds) >= 12
    assert len(run.segments.distinct) <= len(few.segments.distinct) + 1
    ups = [run.segments.nodes[f"blocks_{i}_up"] for i in range(2, 12)]
    assert len({cost.saved_bytes for cost in ups}) == 1


def test_blocks_of_another_width_are_not_taken_for_equal():
    model = Stack(2)
    model.blocks[1].up, model.blocks[1].down = nn.Linear(8, 24), nn.Linear(24, 8)
    workload = Workload(x=(4,), target=(2,))
    capture = captured(model, **workload.example_item(5))
    costs = measure(capture, workload, device="cpu", microbatch_sizes=(2,)).measurements[0].costs
    assert costs["blocks_0_up"].output_bytes == 2 * 16 * 4
    assert costs["blocks_1_up"].output_bytes == 2 * 24 * 4


def test_a_model_changed_in_place_and_with_tuples_is_measured():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 6)
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x):
            x = self.relu(self.layer(x).mul_(2))
            a, b = x.chunk(2, dim=1)[0], x.chunk(2, dim=1)[1]
            return (a * b.detach()).sum()

    model, workload = Net(), Workload(x=(4,))
    capture = captured(model, **workload.example_item(5))
    run = size_run(capture, workload, 3, least_seconds=1e-9)
    measured = run.measurement()
    x = workload.example_item(3)["x"]
    assert sum(cost.saved_bytes for cost in measured.costs.values()) == independent_saved_bytes(model, model, x)


def test_further_windows_repeat_every_time_and_count_no_byte_twice():
    _, capture, workload = stack_of(blocks=4)
    once, often = size_run(capture, workload, 3), size_run(capture, workload, 3)
    for _ in range(3):
        often.window()
    assert {len(cost.windows.times) for cost in often.segments.distinct.values()} == {3}
    assert len(often.whole.windows.times) == 3

    def memory(measurement):
        costs = {n: (c.output_bytes, c.saved_bytes, c.workspace_bytes) for n, c in measurement.costs.items()}
        return costs, measurement.keepers

    assert memory(often.measurement()) == memory(once.measurement())
    assert often.num_windows == 3 and once.num_windows == 1


def test_a_model_without_data_is_measured_run_by_run():
    _, capture, workload = stack_of()
    capture.module.to("meta")
    costs = measure(capture, workload, device="cpu", microbatch_sizes=(2,)).measurements[0].costs
    assert costs["first"].output_bytes == 2 * 8 * 4
    assert capture.module.first.weight.is_meta


def test_a_model_that_does_not_fit_is_measured_in_parts(monkeypatch, caplog):
    _, capture, workload = stack_of()
    count = len(capture.graph.nodes)

    class Small(Piece):
        def __init__(self, nodes, inputs, outputs, state):
            if len(nodes) == count:
                raise torch.OutOfMemoryError("CUDA out of memory")
            super().__init__(nodes, inputs, outputs, state)

    monkeypatch.setattr("autopipe.measure.segment_costs.Piece", Small)
    with caplog.at_level(logging.INFO, "autopipe"):
        measured = size_run(capture, workload, 2, least_seconds=1e-9).measurement()
    assert "does not fit" in caplog.text
    assert sum(cost.forward_seconds for cost in measured.costs.values()) > 0


def test_a_model_that_would_not_fit_is_not_run_as_a_whole(monkeypatch, caplog):
    _, capture, workload = stack_of()
    monkeypatch.setattr("autopipe.measure.segment_costs.available_bytes", lambda device: 1000)
    with caplog.at_level(logging.INFO, "autopipe"):
        measured = size_run(capture, workload, 2).measurement()
    assert "does not fit" in caplog.text and "add up to" not in caplog.text
    assert sum(cost.forward_seconds for cost in measured.costs.values()) > 0


def test_a_part_that_does_not_fit_is_an_error_with_a_remedy(monkeypatch):
    _, capture, workload = stack_of()

    def full(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("autopipe.measure.segment_costs.Piece", full)
    with pytest.raises(ProfileError, match="do not fit the device, even alone, at a microbatch of 2") as caught:
        measure(capture, workload, device="cpu", microbatch_sizes=(2,))
    assert "--microbatch-sizes" in caught.value.remedy


def test_a_node_that_fails_is_named_with_the_users_line():
    _, capture, workload = stack_of()
    workload.shapes["x"] = (5,)
    with pytest.raises(ProfileError, match=r"measuring first \(first\) at a microbatch of 2 failed") as caught:
        measure(capture, workload, device="cpu", microbatch_sizes=(2,))
    assert caught.value.where == "net.py:7"


def test_a_size_at_which_the_model_cannot_run_is_skipped_with_a_warning(caplog):
    _, capture, workload = stack_of()  # its BatchNorm refuses a single sample
    with caplog.at_level(logging.WARNING, "autopipe"):
        profile = measure(capture, workload, device="cpu", microbatch_sizes=(1, 2))
    assert [m.microbatch_size for m in profile.measurements] == [2]
    assert "a microbatch of 1 is left out" in caplog.text and "more than 1 value per channel" in caplog.text


@pytest.mark.parametrize(
    ("seconds", "free_bytes", "measured"), [(60.0, 1 << 40, [2, 4, 8, 16]), (0.0, 1 << 40, [2, 4]), (60.0, 1, [2, 4])]
)
def test_larger_sizes_are_measured_if_they_are_quick_and_fit(seconds, free_bytes, measured, monkeypatch):
    _, capture, workload = stack_of()
    monkeypatch.setattr(segment_costs, "available_bytes", lambda device: free_bytes)
    sizes = {"microbatch_sizes": (2, 4), "larger_sizes": (3, 8, 16), "quick_seconds": seconds}
    progress = []
    profile = measure(capture, workload, device="cpu", **sizes, progress=lambda text, part: progress.append(part))
    assert [measurement.microbatch_size for measurement in profile.measurements] == measured
    assert progress == sorted(progress)
    assert all(sum(cost.forward_seconds for cost in m.costs.values()) > 0 for m in profile.measurements)


def test_sizes_that_take_long_are_left_out_with_a_warning(caplog):
    _, capture, workload = stack_of()
    with caplog.at_level(logging.WARNING, "autopipe"):
        profile = measure(capture, workload, device="cpu", microbatch_sizes=(2, 4, 8), slow_seconds=1e-9)
    assert [measurement.microbatch_size for measurement in profile.measurements] == [2]
    assert "a microbatch of 4 is left out" in caplog.text and "a microbatch of 8 is left out" in caplog.text


def test_sizes_between_others_are_interpolated_if_they_take_long(caplog):
    _, capture, workload = stack_of()
    sizes = {"microbatch_sizes": (2, 4, 6, 8), "enough_seconds": 0.0}
    profile = measure(capture, workload, device="cpu", **sizes, between_seconds=1e-9)
    assert [measurement.microbatch_size for measurement in profile.measurements] == [2, 8]
    every = measure(capture, workload, device="cpu", **sizes, between_seconds=60.0)
    assert [measurement.microbatch_size for measurement in every.measurements] == [2, 4, 6, 8]
    for name, cost in every.at(6).costs.items():
        assert profile.at(6).costs[name].saved_bytes == pytest.approx(cost.saved_bytes, rel=0.1), name
    assert "left out" not in caplog.text


def test_a_batch_without_an_input_of_the_graph_is_an_error():
    _, capture, workload = stack_of()
    del workload.shapes["target"]
    with pytest.raises(ProfileError, match="the batch has no 'target'"):
        measure(capture, workload, device="cpu", microbatch_sizes=(2,))


def test_sizes_and_devices_are_checked():
    _, capture, workload = stack_of()
    with pytest.raises(ProfileError, match="are not positive"):
        measure(capture, workload, device="cpu", microbatch_sizes=(0, 2))
    with pytest.raises(ProfileError, match="unknown device 'gpu'"):
        find_device("gpu")
    with pytest.raises(ProfileError, match="cannot measure on meta"):
        find_device("meta")
    if not torch.cuda.is_available():
        assert find_device("auto").type == "cpu"
        with pytest.raises(ProfileError, match=r"CUDA finds no device|built without CUDA"):
            find_device("cuda")


@pytest.mark.parametrize(("make", "states"), [(torch.optim.AdamW, 2.0), (torch.optim.SGD, 0.0)])
def test_the_step_and_state_of_the_optimizer_are_measured(make, states):
    _, capture, workload = stack_of(width=64)
    workload.make = make
    profile = measure(capture, workload, device="cpu", microbatch_sizes=(2,))
    assert profile.optimizer_seconds_per_byte > 0
    assert profile.optimizer_bytes_per_byte == pytest.approx(states, abs=0.01)


def test_a_model_without_trained_parameters_has_no_step():
    model = Stack().requires_grad_(False)
    workload = Workload(x=(4,), target=(2,))
    profile = measure(captured(model, **workload.example_item(5)), workload, device="cpu", microbatch_sizes=(2,))
    assert (profile.optimizer_seconds_per_byte, profile.optimizer_bytes_per_byte) == (0.0, 0.0)
    assert all(cost.backward_seconds == cost.saved_bytes == 0 for cost in profile.measurements[0].costs.values())


def test_progress_runs_from_zero_to_all():
    _, capture, workload = stack_of()
    seen = []
    measure(capture, workload, device="cpu", microbatch_sizes=(2, 3), progress=lambda text, part: seen.append(part))
    assert seen == sorted(seen) and seen[-1] == 1.0 and 0 <= seen[0] < 0.1


def test_regions_without_gradient_and_under_autocast_are_entered():
    _, capture, _ = stack_of()
    nodes = {node.name: node for node in capture.module.graph.nodes}
    nodes["first"].meta["grad"] = False
    nodes["blocks_0_norm"].meta["autocast"] = (("cpu", torch.bfloat16, True, True),)
    nodes["blocks_0_up"].meta["autocast"] = (("cpu", torch.bfloat16, True, True),)
    chosen = [nodes[name] for name in ("first", "blocks_0_norm", "blocks_0_up", "relu", "blocks_0_down")]
    outputs = ("first", "blocks_0_up", "blocks_0_down")
    piece = Piece(chosen, ["x"], outputs, StateCopies(capture.module, torch.device("cpu")))
    with pytest.raises(RuntimeError, match="same dtype"):
        piece([torch.zeros(2, 4)])  # the last one has bfloat16 input, outside of the region
    first, up = Piece(chosen[:3], ["x"], outputs[:2], StateCopies(capture.module, torch.device("cpu")))(
        [torch.zeros(2, 4)]
    )
    assert not first.requires_grad and up.dtype is torch.bfloat16 and up.requires_grad
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


# --- the parts --------------------------------------------------------------------------------------------------------


def test_the_load_of_the_machine_is_recorded_for_every_size():
    _, capture, workload = stack_of()
    run = size_run(capture, workload, 2)
    clock = run.subject.clock
    clock.wall_seconds, clock.own_seconds = 1000.0, 500.0
    run.measurement()
    assert clock.steal_time == pytest.approx(0.5, abs=0.01)


def test_regions_and_devices_of_the_capture_are_those_of_the_device_that_computes():
    """On a GPU, the measured calls run under the autocast rules of the GPU, as in the stage files."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    product = graph.call_function(torch.matmul, (x, x))
    product.meta["autocast"] = (("cpu", torch.bfloat16, True, True),)
    zeros = graph.call_function(torch.zeros, (1,), {"device": torch.device("cpu")})
    ones = graph.call_function(torch.ones, (1,), {"device": "cpu"})
    cuda = StateCopies(nn.Module(), torch.device("cuda", 0))
    piece = Piece([product, zeros, ones], ["x"], ["matmul"], cuda)
    (entered,) = [n for n in piece.module.graph.nodes if n.target is torch.amp.autocast_mode._enter_autocast]
    assert entered.args == ("cuda", torch.bfloat16, True, True)
    devices = [n.kwargs["device"] for n in piece.module.graph.nodes if n.target in (torch.zeros, torch.ones)]
    assert devices == [torch.device("cuda", 0)] * 2
    on_cpu = Piece([product, zeros, ones], ["x"], ["matmul"], StateCopies(nn.Module(), torch.device("cpu")))
    assert [n.args[0] for n in on_cpu.module.graph.nodes if n.target is torch.amp.autocast_mode._enter_autocast] == [
        "cpu"
    ]
    assert arguments_on(torch.device("cpu"), ones.args, ones.kwargs) == (ones.args, ones.kwargs)
