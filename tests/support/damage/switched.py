"""The comparisons of the product: how each is switched off, and the pair that is not seen without it.

Switched off, a comparison gets what plain training computed in place of what the stages did.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from support.damage.registry import Ran, add, damages

DIFFERENCES = "verify.check", "_differences"


def _from_plain(field: str) -> Callable[..., Any]:
    def replace(differences: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
        def switched_off(trained: Any, plain: Any, *others: Any) -> Any:
            ran()
            setattr(trained, field, getattr(plain, field))
            return differences(trained, plain, *others)

        return switched_off

    return replace


for FIELD in ("gradients", "buffers", "losses"):
    add(f"off_{FIELD}", *DIFFERENCES, _from_plain(FIELD))


def _parameters(averaged: bool) -> Callable[..., Any]:
    def replace(differences: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
        def switched_off(trained: Any, plain: Any, *others: Any) -> Any:
            ran()
            same = {n: tensor for n, tensor in plain.parameters.items() if n.startswith("ema.") == averaged}
            trained.parameters = {**trained.parameters, **same}
            return differences(trained, plain, *others)

        return switched_off

    return replace


add("off_weights", *DIFFERENCES, _parameters(averaged=False))
add("off_averages", *DIFFERENCES, _parameters(averaged=True))


@damages("script.checking", "Reference.compare")
def off_script(compare: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    def switched_off(self: Any, *arguments: Any) -> None:
        ran()

    return switched_off


COMPARISONS: dict[str, tuple[str, str]] = {
    "off_gradients": ("signs", "grad_x2"),
    "off_weights": ("two", "decay_second"),
    "off_buffers": ("fp32", "buffers_frozen"),
    "off_losses": ("fp32", "loss_reported"),
    "off_averages": ("ema", "ema_off"),
    "off_script": ("run", "script_backward"),
}
"""A comparison -> the setting and the damage of the pair that only it sees."""
