"""What holds on simulated devices: ``python trials.py NAME`` runs one trial in a process that has them.

``DEVICE`` is "cuda" or "testdev", as the process has the one or the other.
"""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

warnings.simplefilter("ignore")
DEVICE = torch.accelerator.current_accelerator().type  # type: ignore[union-attr]
MODULE: Any = torch.get_device_module(DEVICE)
SIMULATED: Any = MODULE.simulated


@contextlib.contextmanager
def refused(kind: type[Exception], text: str) -> Iterator[None]:
    try:
        yield
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"no {kind.__name__}: {text}")


def four_devices_and_the_current_one() -> None:
    assert MODULE.device_count() == 4 and torch.ones(2, device=DEVICE).device == torch.device(DEVICE, 0)
    with MODULE.device(2):
        assert torch.ones(3, device=DEVICE).device.index == 2 and MODULE.current_device() == 2
    assert MODULE.current_device() == 0
    with torch.device(DEVICE):
        assert nn.Linear(3, 4).weight.device.type == DEVICE
    with refused(RuntimeError, "invalid device ordinal"):
        MODULE.set_device(4)


def mixed_devices_are_refused() -> None:
    zero, one, host = torch.ones(3, device=f"{DEVICE}:0"), torch.ones(3, device=f"{DEVICE}:1"), torch.ones(3)
    for other, name in ((one, f"{DEVICE}:1"), (host, "cpu")):
        with refused(RuntimeError, "Expected all tensors to be on the same device"):
            zero + other
        with refused(RuntimeError, name):
            torch.cat([zero, other])
    assert (zero + torch.tensor(1.0)).tolist() == [2, 2, 2]  # a number of the host may be mixed
    with refused(TypeError, "Use Tensor.cpu()"):
        zero.numpy()


def memory_is_accounted_and_limited() -> None:
    SIMULATED.limit(0, 1 << 20)
    before = MODULE.memory_allocated()
    tensor = torch.ones(1000, device=DEVICE)
    view = tensor.view(10, 100)
    assert MODULE.memory_allocated() - before == 4096
    with refused(torch.OutOfMemoryError, "simulated device 0 out of memory. Tried to allocate 4194304 bytes"):
        torch.empty(1 << 20, device=DEVICE)
    torch.empty(1 << 20, device=f"{DEVICE}:1")
    tensor.resize_(2000)
    assert MODULE.memory_allocated() - before == 8192
    del tensor
    assert MODULE.memory_allocated() > before
    del view
    assert MODULE.memory_allocated() == before and MODULE.max_memory_allocated() >= before + 8192


def views_share_their_memory() -> None:
    tensor = torch.zeros(2, 3, device=DEVICE)
    tensor[0] += 1
    tensor.t()[2] = 5
    tensor.view(-1)[0] = 9
    assert tensor.tolist() == [[9, 1, 5], [0, 0, 5]]


def generators_have_seed_and_offset() -> None:
    torch.manual_seed(3)
    cpu = torch.get_rng_state()
    state = MODULE.get_rng_state()
    assert state.view(torch.int64).tolist() == [3, 0]
    first = torch.randn(1000, device=DEVICE)
    assert MODULE.get_rng_state().view(torch.int64).tolist() == [3, 4]
    nn.functional.dropout(first, 0.5)
    assert MODULE.get_rng_state().view(torch.int64).tolist() == [3, 8]
    assert torch.equal(torch.get_rng_state(), cpu), "the CPU's generator does not move"
    MODULE.set_rng_state(state)
    assert torch.equal(torch.randn(1000, device=DEVICE), first)
    own = torch.Generator(DEVICE).manual_seed(3)
    assert torch.equal(torch.randn(1000, device=DEVICE, generator=own), first)
    with refused(RuntimeError, "device type for generator"):
        torch.randn(3, device=DEVICE, generator=torch.Generator())
    SIMULATED.multiprocessors(1, 2)
    torch.randn(100_000, device=f"{DEVICE}:1")
    torch.randn(100_000, device=f"{DEVICE}:0")
    assert MODULE.get_rng_state(1).view(torch.int64)[1] > 4 > 3, "a small device draws in more rounds"


def attention_without_dropout_draws_nothing() -> None:
    query = torch.randn(1, 2, 4, 8, device=DEVICE)
    before = MODULE.get_rng_state()
    nn.functional.scaled_dot_product_attention(query, query, query)
    assert torch.equal(MODULE.get_rng_state(), before)


def streams_and_events_wait_for_nothing() -> None:
    stream, event = torch.Stream(DEVICE), torch.Event(DEVICE, enable_timing=True)
    with stream:
        torch.ones(2, device=DEVICE)
    event.record(stream)
    stream.wait_event(event)
    event.synchronize()
    later = torch.Event(DEVICE, enable_timing=True)
    later.record(stream)
    assert event.elapsed_time(later) >= 0 and SIMULATED.counters()["events"] == 2


def autograd_and_autocast() -> None:
    weight = torch.ones(3, device=f"{DEVICE}:2", requires_grad=True)
    (weight * 2).pow(2).sum().backward()
    assert weight.grad is not None and weight.grad.device == weight.device and weight.grad.tolist() == [8, 8, 8]
    with torch.autocast(DEVICE, torch.bfloat16):
        output = nn.Linear(4, 4, device=DEVICE)(torch.ones(2, 4, device=DEVICE))
        assert output.dtype is torch.bfloat16 and output.softmax(-1).dtype is torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert nn.Linear(4, 4, device=DEVICE)(torch.ones(2, 4, device=DEVICE)).dtype is torch.float32


def scaler_and_fused_optimizer() -> None:
    model = nn.Linear(4, 4, device=DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler(DEVICE)
    scaler.scale(model(torch.ones(2, 4, device=DEVICE)).sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 65536


def pinned_memory_and_copies() -> None:
    pinned = torch.ones(3).pin_memory()
    assert pinned.is_pinned() and not torch.ones(3).is_pinned()
    before = SIMULATED.counters()
    moved = pinned.to(DEVICE, non_blocking=True)
    assert SIMULATED.counters()["to_device"] == before["to_device"] + 12
    assert moved.sum().item() == 3 and SIMULATED.counters()["reads"] == before["reads"] + 1
    dataset = torch.utils.data.TensorDataset(torch.arange(6.0))
    assert next(iter(torch.utils.data.DataLoader(dataset, 3, pin_memory=True)))[0].is_pinned()


def files_name_the_device() -> None:
    model = nn.Linear(2, 2).to(f"{DEVICE}:1")
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    for where, device in ((None, f"{DEVICE}:1"), ("cpu", "cpu"), (f"{DEVICE}:2", f"{DEVICE}:2")):
        file.seek(0)
        assert str(torch.load(file, map_location=where, weights_only=True)["weight"].device) == device
    assert copy.deepcopy(model).weight.device == pickle.loads(pickle.dumps(model.weight)).device


def compiled_traced_and_mapped() -> None:
    assert torch.compile(nn.Linear(2, 2).to(DEVICE), backend="eager")(torch.ones(1, 2, device=DEVICE)).device.index == 0
    assert torch.func.vmap(torch.sum)(torch.ones(3, 2, device=DEVICE)).tolist() == [2, 2, 2]
    from torch._subclasses.fake_tensor import FakeTensorMode

    calls = SIMULATED.counters()["calls"]
    with FakeTensorMode():
        assert (torch.empty(3, device=f"{DEVICE}:1") + 1).device.index == 1
    assert SIMULATED.counters()["calls"] == calls, "a fake tensor computes nothing"


def recurrent_networks() -> None:
    torch.manual_seed(0)
    host = nn.LSTM(4, 8, 2, batch_first=True)
    device, inputs = copy.deepcopy(host).to(DEVICE), torch.randn(2, 3, 4)
    host(inputs)[0].pow(2).sum().backward()
    device(inputs.to(DEVICE))[0].pow(2).sum().backward()
    for one, other in zip(host.parameters(), device.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad.cpu())


def collectives_are_refused() -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    torch.distributed.all_reduce(torch.ones(3))
    with refused(NotImplementedError, "collectives of simulated devices"):
        torch.distributed.all_reduce(torch.ones(3, device=DEVICE))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
