"""``GradScaler`` over gradients of ranks: unscaled where they are. Only whether one is infinite returns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from autopipe.script.state import remote
from autopipe.script.state.remote import is_remote


def install() -> None:
    """Replace how a scaler unscales the gradients of an optimizer."""
    original = torch.amp.GradScaler._unscale_grads_

    def unscale(
        scaler: torch.amp.GradScaler, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if remote.controller is None or not all(map(is_remote, parameters)):
            return original(scaler, optimizer, inv_scale, found_inf, allow_fp16)
        return _on_ranks(remote.controller, parameters, inv_scale, found_inf, allow_fp16)

    torch.amp.GradScaler._unscale_grads_ = unscale  # type: ignore[method-assign,assignment]  # the stub has two self


def _on_ranks(
    controller: Any, parameters: list[Tensor], inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
) -> dict[torch.device, Tensor]:
    """Return as torch does, for the only device, whether a gradient is infinite or NaN; {} without gradients."""
    controller.gradients.push()
    if not controller.gradients.any:
        return {}
    if not allow_fp16 and any(parameter.dtype is torch.float16 for parameter in parameters):
        raise ValueError("Attempting to unscale FP16 gradients.")
    names = [controller.weights.names[id(parameter)] for parameter in parameters]
    answers = [answer for answer in controller.ask(["unscale", names, inv_scale], parks=False) if answer is not None]
    if not answers:
        return {}
    controller.gradients.moved()
    return {found_inf.device: torch.stack([found_inf, *answers]).max()}


def unscaled(gradients: list[Tensor], inv_scale: Tensor) -> Tensor | None:
    """Unscale gradients in place, and return 1 if one is infinite or NaN, else 0; None without gradients.

    ``inv_scale``: a tensor of one element.
    """
    if not gradients:
        return None
    infinite = torch.zeros((), dtype=torch.float32, device=gradients[0].device)
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        same = [gradient for gradient in gradients if gradient.dtype is dtype]
        torch._amp_foreach_non_finite_check_and_unscale_(same, infinite, inv_scale.to(infinite.device))
    return infinite
