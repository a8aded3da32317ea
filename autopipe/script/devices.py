"""The device of a script's model, and the state of its random numbers.

Between processes, values are on the "host" or on the "device": each process has a device of its own. The controller's
is that of the script's model, which is asked once, before any parameter is remote.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autopipe.launch.rank.devices import take_gpu
from autopipe.script.refusals import refused

CPU = torch.device("cpu")
HOST, DEVICE = "host", "device"
"""Where a value is, in a message."""
COUNT = "count"
"""In the states of generators: how many numbers a GPU's will give."""


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the parameters of a model. Raises: RefusedError if they are on several devices."""
    names: dict[torch.device, str] = {}
    for name, parameter in model.named_parameters():
        names.setdefault(parameter.device, name)
    for device, name in names.items():
        if device.type not in (CPU.type, "cuda"):
            raise refused(f"{name} is on {device}: models run in stages on CPUs and on CUDA's GPUs")
    if len(names) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in names.items())
        raise refused(f"the parameters of the model are on several devices: {places}", "all of them on one")
    return next(iter(names), CPU)


def device_of_rank(kind: str, rank: int, local_rank: int) -> torch.device:
    """Return the device of a rank, and make it the current one. ``kind``: "cpu" or "cuda".

    ``local_rank``: among the ranks of its host, which take the GPUs in turn.

    Raises: RunError if this host has no GPU, or CUDA cannot start on it.
    """
    return CPU if kind == CPU.type else torch.device(kind, take_gpu(rank, local_rank))


def kind_of(device: torch.device) -> list[Any]:
    """Return what decides the numbers that a generator draws: the name of a GPU and its multiprocessors."""
    if device.type != "cuda":
        return [device.type]
    properties = torch.cuda.get_device_properties(device)
    return [properties.name, properties.multi_processor_count]


def place_of(device: torch.device, own: torch.device) -> str:
    """Return HOST or DEVICE for a device, "" for one that is neither. ``own``: the device of this process."""
    if device.type == CPU.type:
        return HOST
    return DEVICE if device.type == own.type and device.index in (own.index, None) else ""


def parsed(value: Any, own: torch.device) -> Any:
    """Return the device that an argument of a call names as text or by its number; any other value as it is.

    In another process the text would name another device.
    """
    if type(value) is int and own.type != CPU.type:
        return torch.device(own.type, value)
    if not isinstance(value, str) or value.partition(":")[0] not in (own.type, CPU.type):
        return value
    try:
        return torch.device(value)
    except RuntimeError:
        return value


# --- random numbers ---------------------------------------------------------------------------------------------------


def generators(device: torch.device) -> dict[str, Tensor]:
    """Return the states of the generators that a model on this device draws from, by place.

    That of a GPU is 16 bytes: a seed and an offset.
    """
    states = {HOST: torch.get_rng_state()}
    if device.type != CPU.type:
        states[DEVICE] = torch.get_device_module(device).get_rng_state(device)
    return states


def set_generators(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Set generators to states that ``generators`` has returned, perhaps in another process."""
    if HOST in states:
        torch.set_rng_state(states[HOST])
    if DEVICE in states:
        torch.get_device_module(device).set_rng_state(states[DEVICE], device)


def moved(before: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return those of the earlier states whose generators have moved since."""
    now = generators(device)
    return {place: state for place, state in before.items() if not torch.equal(state, now[place])}


def offset_of(state: Tensor) -> int:
    """Return the offset in a state of a GPU's generator."""
    return int(state.view(torch.int64)[1])


def advanced(state: Tensor, count: int) -> Tensor:
    """Return a state of a GPU's generator with a larger offset."""
    later = state.clone()
    later.view(torch.int64)[1] += count
    return later
