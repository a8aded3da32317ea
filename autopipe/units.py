"""The one place that formats and parses bytes, seconds and bandwidths.

``in_*`` return text for tables, sentences and errors; ``parse_*`` read what a user wrote. Sizes are shown in binary
units (GiB), bandwidths in decimal ones (GB/s).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from fractions import Fraction

from autopipe.errors import PlanError, unknown_choice

KIB, MIB, GIB = 2**10, 2**20, 2**30

_SIZES = ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))

_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE]([+-]?[0-9]{1,2}))?\s*([A-Za-z/]*)\s*")
_DECIMAL = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_PREFIXES = _DECIMAL | {"Ki": KIB, "Mi": MIB, "Gi": GIB, "Ti": 2**40}
# fractions, because 5 * 1e-6 is not 5e-6
_SECOND_UNITS = {unit: Fraction(1, 10**digits) for unit, digits in (("s", 0), ("ms", 3), ("us", 6), ("ns", 9))}
_BYTE_UNITS = {prefix + "B": Fraction(factor) for prefix, factor in _PREFIXES.items()}
_BANDWIDTH_UNITS = {f"{unit}/s": factor for unit, factor in _BYTE_UNITS.items()}
_BANDWIDTH_UNITS |= {f"{prefix}bit/s": Fraction(factor, 8) for prefix, factor in _PREFIXES.items()}
_BANDWIDTH_UNITS |= {f"{prefix}bps": Fraction(factor, 8) for prefix, factor in _PREFIXES.items()}


def finite(value: float) -> float | None:
    """Return a number; None for NaN and infinities, which JSON cannot represent."""
    return value if math.isfinite(value) else None


def in_bytes(count: float) -> str:
    """Return a size with three digits: ``1.50 GiB``, ``12.0 MiB``, ``34 B``."""
    for size, unit in _SIZES:
        if abs(count) >= size:
            return f"{_three(count / size)} {unit}"
    return f"{count:.0f} B"


def in_flops(count: float) -> str:
    """Return a number of floating-point operations: ``1.65 TFLOP``."""
    for factor, unit in ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP")):
        if count >= factor:
            return f"{_three(count / factor)} {unit}"
    return f"{count:.0f} FLOP"


def in_short_bytes(count: float, digits: int = 3) -> str:
    """Return a size of at least 0 without trailing zeros, in KiB or larger units: ``1.5 GiB``, ``12 MiB``."""
    if count >= 1000 * GIB:
        return f"{count / GIB:,.0f} GiB"
    size, unit = _size_unit(count)
    return f"{_significant(count / size, digits)} {unit}"


def in_bytes_rounded_up(count: float) -> str:
    """Return a size of at least 0 as ``in_short_bytes`` does, rounded up: the amount shown suffices."""
    size, _ = _size_unit(count)
    value = count / size
    step = 10.0 ** (math.floor(math.log10(value)) - 2) if value > 0 else 1.0
    return in_short_bytes(math.ceil(value / step - 1e-9) * step * size)


def in_distinct_bytes(one: float, other: float) -> tuple[str, str]:
    """Return two sizes with as many digits as it takes to tell them apart."""
    texts = "", ""
    for digits in range(3, 16):
        texts = in_short_bytes(one, digits), in_short_bytes(other, digits)
        if texts[0] != texts[1]:
            break
    return texts


def in_gib(count: float) -> str:
    """Return a size in GiB with one decimal: ``23.5 GiB``."""
    return f"{count / GIB:.1f} GiB"


def as_size_option(count: float) -> str:
    """Return a size as an option takes it, rounded down to three digits: ``23.5GiB``."""
    size, unit = _size_unit(count)
    value = count / size
    step = 10.0 ** (math.floor(math.log10(value)) - 2) if value > 0 else 1.0
    return f"{_significant(math.floor(value / step + 1e-9) * step, 3)}{unit}"


def in_seconds(seconds: float) -> str:
    """Return a time with three digits: ``1.25 s``, ``3.40 ms``, ``12.0 us``."""
    for size, unit in _TIMES:
        if abs(seconds) >= size:
            return f"{_three(seconds / size)} {unit}"
    return "0 s" if seconds == 0 else f"{seconds * 1e9:.0f} ns"


def in_bandwidth(bytes_per_second: float, digits: int = 3) -> str:
    """Return a bandwidth: ``10 GB/s``."""
    return f"{_significant(bytes_per_second / 1e9, digits)} GB/s"


def parse_bytes(text: str, *, where: str = "") -> int:
    """Return bytes: "16GiB", "80GB", "512 MiB". Raises: PlanError."""
    return round(_positive(_parse(text, _BYTE_UNITS, "a size in bytes such as 16GiB", where), "size", where))


def parse_bandwidth(text: str, *, where: str = "") -> float:
    """Return bytes per second: "10GB/s", "400Gbit/s", "25Gbps". Raises: PlanError."""
    wanted = "a bandwidth such as 10GB/s or 400Gbit/s"
    return _positive(_parse(text, _BANDWIDTH_UNITS, wanted, where), "bandwidth", where)


def parse_seconds(text: str, *, where: str = "") -> float:
    """Return seconds: "5us", "1.5 ms". Raises: PlanError."""
    return _parse(text, _SECOND_UNITS, "a time such as 5us", where)


def _three(value: float) -> str:
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:.{digits}f}"


def _size_unit(count: float) -> tuple[int, str]:
    return next((unit for unit in _SIZES if count >= unit[0]), _SIZES[-1])


def _significant(value: float, digits: int) -> str:
    """Return a number to ``digits`` significant digits, never as 1e+03: 1000 MiB are less than 1 GiB."""
    text = f"{value:.{digits}g}"
    return f"{float(text):.0f}" if "e+" in text else text


def _parse(text: str, units: Mapping[str, Fraction], wanted: str, where: str) -> float:
    match = _QUANTITY.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise PlanError(f"{text!r} is not {wanted}", where=where)
    number, exponent, unit = match.groups()
    if unit not in units:
        what = f"{text!r} has no unit" if not unit else unknown_choice("unit", unit, units)
        raise PlanError(what, where=where, remedy=f"write {wanted}")
    return float(Fraction(f"{number}e{exponent or 0}") * units[unit])


def _positive(value: float, what: str, where: str) -> float:
    """Return the value. Raises: PlanError unless it is above 0 and fits in 64 bits."""
    if not value > 0:
        raise PlanError(f"a {what} must be larger than 0, and is {value:.3g}", where=where)
    if value >= 2**63:
        raise PlanError(f"a {what} of {value:.3g} is out of range", where=where)
    return value
