"""Find different parameters of a model that share memory."""

from __future__ import annotations

from torch import nn


def overlapping(model: nn.Module) -> tuple[str, str] | None:
    """Return the names of two parameters whose elements share memory, such as a view of another; None if none do.

    One parameter under two names is a tie and does not count.
    """
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.numel():
            continue
        start = int(parameter.storage_offset()) * parameter.element_size()
        extent = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True)) + 1
        end = start + int(extent) * parameter.element_size()
        others = spans.setdefault(parameter.untyped_storage().data_ptr(), [])
        for other_start, other_end, other in others:
            if start < other_end and other_start < end:
                return other, name
        others.append((start, end, name))
    return None
