"""Sizes, rates and times as people write them: ``24GiB``, ``25Gbit/s``, ``5us``."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-zµ]*)\s*")
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_PREFIXES = _DECIMAL | _BINARY
_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "µs": 10**6, "ns": 10**9}


def _parse(text: str) -> tuple[float, str]:
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a number with a unit")
    return float(match[1]), match[2]


def parse_bytes(text: str) -> int:
    """Return the bytes of ``24GiB``, ``16GB``, ``512MiB`` or a plain number.

    Raises: ValueError that shows the forms.
    """
    value, unit = _parse(text)
    prefix = unit.lower().removesuffix("b")
    if prefix not in _PREFIXES:
        raise ValueError(f"{text!r} is no size; write 24GiB, 16GB or 512MiB")
    return round(value * _PREFIXES[prefix])


def parse_rate(text: str) -> float:
    """Return the bytes per second of ``25Gbit/s``, ``10GB/s``, ``1.5GiB/s`` or ``100Gbps``.

    Raises: ValueError that shows the forms.
    """
    help_text = f"{text!r} is no rate; write 25Gbit/s or 10GB/s"
    stripped = text.strip()
    if stripped.lower().endswith("bps"):
        stripped = stripped[:-3] + "bit/s"
    amount, slash, per = stripped.rpartition("/")
    if not slash or per.strip() != "s":
        raise ValueError(help_text)
    value, unit = _parse(amount)
    for ending, divisor in (("bits", 8), ("bit", 8), ("B", 1)):
        prefix = unit.removesuffix(ending).lower()
        if unit.endswith(ending) and prefix in _PREFIXES and value > 0:
            return value * _PREFIXES[prefix] / divisor
    raise ValueError(help_text)


def parse_seconds(text: str) -> float:
    """Return the seconds of ``5us``, ``0.2ms`` or ``1s``.

    Raises: ValueError that shows the forms.
    """
    value, unit = _parse(text)
    if unit not in _PER_SECOND:
        raise ValueError(f"{text!r} is no time; write 5us, 0.2ms or 1s")
    return value / _PER_SECOND[unit]
