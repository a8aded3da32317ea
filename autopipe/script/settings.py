"""What of torch a script sets at any time and changes numbers: switches, and the regions of autocast."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.backends import cuda

from autopipe.script.devices import CPU
from autopipe.script.refusals import refused

_ATTENTION: dict[str, tuple[Any, Any]] = {  # torch has no annotations for them
    "flash": (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    "efficient": (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    "math": (cuda.math_sdp_enabled, cuda.enable_math_sdp),
}

_ATTRIBUTES = (
    *("cudnn.enabled", "cudnn.benchmark", "cudnn.deterministic", "cuda.matmul.allow_fp16_accumulation"),
    *(f"cuda.matmul.allow_{kind}_reduced_precision_reduction" for kind in ("fp16", "bf16")),
)
"""Attributes of ``torch.backends``."""
_PRECISIONS = (
    ("generic", "all"),
    *((backend, operation) for backend in ("cuda", "mkldnn") for operation in ("all", "matmul", "conv", "rnn")),
)
"""(backend, operation) of ``fp32_precision`` in ``torch.backends``, such as TF32 in products."""


def settings_now() -> dict[str, Any]:
    """Return the switches of this process."""
    return {
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "default_device": torch.get_default_device().type,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "mkldnn": torch._C._get_mkldnn_enabled(),
        "denormals": bool(
            torch.full((1,), 1e-30, dtype=torch.float32, device="cpu").mul(1e-10)
        ),  # there is no function that tells
        "anomaly": (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        **{name: now() for name, (now, _) in _ATTENTION.items()},
        **{name: operator.attrgetter(name)(torch.backends) for name in _ATTRIBUTES},
        "fp32": [torch._C._get_fp32_precision_getter(*place) for place in _PRECISIONS],
    }


def set_all(settings: dict[str, Any], device: torch.device = CPU) -> None:
    """Set the switches in this process. ``device``: of its stages, where the script may create tensors by default."""
    default = device if settings["default_device"] == device.type else CPU
    if torch.get_default_device() != default:
        torch.set_default_device(None if default == CPU else default)
    if settings["threads"] != torch.get_num_threads():
        torch.set_num_threads(settings["threads"])
    torch.set_default_dtype(settings["dtype"])
    deterministic = settings["deterministic"], settings["warn_only"]
    if deterministic != (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    ):  # the function imports torch._inductor, which takes more than a second
        torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])
    torch.set_float32_matmul_precision(settings["precision"])
    torch._C._set_mkldnn_enabled(settings["mkldnn"])
    torch.set_flush_denormal(not settings["denormals"])
    anomaly: Any = torch.autograd.set_detect_anomaly
    anomaly(*settings["anomaly"])
    for name, (_, change) in _ATTENTION.items():
        change(settings[name])
    for name in _ATTRIBUTES:
        owner, _, attribute = name.rpartition(".")
        setattr(operator.attrgetter(owner)(torch.backends), attribute, settings[name])
    for place, precision in zip(_PRECISIONS, settings["fp32"], strict=True):
        if precision != torch._C._get_fp32_precision_getter(*place):
            torch._C._set_fp32_precision_setter(*place, precision)


Autocast = tuple[tuple[str, torch.dtype, bool], ...]
"""(device, dtype, cache) of the regions of autocast around a call."""


def autocast_now() -> Autocast:
    """Return the autocast regions in which the script is: that of the CPU, and that of CUDA."""
    cache = torch.is_autocast_cache_enabled()
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return tuple((kind, torch.get_autocast_dtype(kind), cache) for kind in kinds)


class Regions:
    """The regions of autocast in which the model was called.

    The cache of a region keeps the cast weights, with their gradients, to its end. Ranks cast them in every call.
    """

    def __init__(self) -> None:
        self._now = 0  # how often the cache was emptied
        self._of_calls: dict[int, int] = {}
        self._last, self._outdated = -1, -1  # of the last call, and of a call whose weights have changed since

    def end(self) -> None:
        """Note that the cache is emptied."""
        self._now += 1

    def note(self, call: int) -> None:
        """Note a call with a cache. Raises: RefusedError if the cache of one process would have older weights."""
        if self._outdated == self._now:
            raise refused(
                "a call of the model in an autocast region in which its weights have changed since an earlier call: "
                "python would use the old weights",
                "a region for each step",
            )
        self._last = self._of_calls[call] = self._now

    def changed(self) -> None:
        """Note that the weights have changed."""
        self._outdated = self._last

    def backward(self, calls: list[int], *, retain: bool) -> None:
        """Note a backward through calls. Raises: RefusedError if two of them have one cache."""
        regions = [self._of_calls[call] for call in calls if call in self._of_calls]
        if len(set(regions)) < len(regions):
            raise refused(
                "one backward through two calls of the model in one autocast region, where torch adds gradients in the "
                "smaller type",
                "a region for each call, or autocast with cache_enabled=False",
            )
        for call in () if retain else calls:
            self._of_calls.pop(call, None)
