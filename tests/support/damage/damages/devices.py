"""Damage to what lets a script on a GPU run in stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from support.damage.registry import Ran, damages


@damages("script.settings", "autocast_now")
def autocast_of_gpu_lost(now: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Forget the autocast region of the GPU."""

    def damaged() -> Any:
        ran()
        return tuple(region for region in now() if region[0] != "cuda")

    return damaged


@damages("script.devices", "generators")
def generator_of_gpu_lost(generators: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Forget the GPU's generator."""

    def damaged(device: Any) -> Any:
        ran()
        return {place: state for place, state in generators(device).items() if place == "host"}

    return damaged


@damages("script.devices", "device_of_rank")
def rank_stays_on_host(device_of_rank: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Let a rank compute on the host."""

    def damaged(kind: str, rank: int, local_rank: int) -> Any:
        ran()
        return device_of_rank("cpu", rank, local_rank)

    return damaged


@damages("script.devices", "place_of")
def place_is_lost(place_of: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Let every value arrive on the host."""

    def damaged(device: Any, own: Any) -> Any:
        ran()
        return place_of(device, own) and "host"

    return damaged


@damages("script.devices", "advanced")
def generator_does_not_advance(advanced: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Leave the GPU's generator where it was after the draws of a known program."""

    def damaged(state: Any, count: int) -> Any:
        ran()
        return advanced(state, 0)

    return damaged


@damages("script.state.parked", "park")
def model_is_not_parked(park: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Let a model be on the GPU of the script."""

    def damaged(tensor: Any, host: Any, device: Any, **_: Any) -> None:
        ran()
        tensor.data = host.to(device)

    return damaged


@damages("script.state.parked", "storage_uses")
def alias_is_lost(storage_uses: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Drop the copy of a parameter while a view of it is alive."""

    def damaged(tensor: Any) -> int:
        ran()
        return 1

    return damaged
