"""Draw loss curves as an SVG with panels and a legend, without dependencies."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT, GAP, LEFT, TOP = 360, 260, 70, 55, 40
# a palette for colour-blind readers: Okabe and Ito, 2008
COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00")
POINTS = 80


@dataclass(frozen=True)
class Panel:
    """One panel of the figure."""

    title: str
    batch_size: int
    curves: Mapping[str, Sequence[float]]  # label -> loss of every minibatch


def smoothed(losses: Sequence[float], points: int = POINTS) -> list[tuple[float, float]]:
    """Return about ``points`` pairs (minibatches so far, mean loss of as many consecutive minibatches)."""
    size = max(len(losses) // points, 1)
    starts = range(0, len(losses) - size + 1, size)
    return [(start + size / 2, statistics.fmean(losses[start : start + size])) for start in starts]


def ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers between two bounds."""
    step = next(s * 10**e for e in range(-4, 9) for s in (1, 2, 5) if (high - low) / (s * 10**e) <= 6)
    first = int(low / step) + (low > 0 and low % step > 0)
    return [step * k for k in range(first, int(high / step) + 1)]


def text(x: float, y: float, content: str, anchor: str = "middle", size: int = 11) -> str:
    """Return a text element."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(content)}</text>'


def drawn(panel: Panel, colours: Mapping[str, str], left: float) -> list[str]:
    """Return the elements of one panel, with the upper left corner of its frame at (left, TOP)."""
    curves = {label: smoothed(losses) for label, losses in panel.curves.items()}
    values = [y for curve in curves.values() for _, y in curve]
    low, high = min(0.0, *values), max(values) * 1.03
    most = max(len(losses) for losses in panel.curves.values())

    def x(minibatches: float) -> float:
        return left + WIDTH * minibatches / most

    def y(loss: float) -> float:
        return TOP + HEIGHT * (1 - (loss - low) / (high - low))

    elements = [text(left + WIDTH / 2, TOP - 12, panel.title, size=13)]
    for value in ticks(low, high):
        elements.append(f'<path d="M{left},{y(value):.1f}h{WIDTH}" stroke="#ddd"/>')
        elements.append(text(left - 6, y(value) + 4, f"{value:g}", "end"))
    for samples in ticks(0, most * panel.batch_size):
        elements.append(text(x(samples / panel.batch_size), TOP + HEIGHT + 16, f"{samples:g}"))
    elements.append(f'<rect x="{left}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#888"/>')
    for label, curve in curves.items():
        points = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in curve)
        elements.append(f'<polyline points="{points}" fill="none" stroke="{colours[label]}" stroke-width="1.3"/>')
    elements.append(text(left + WIDTH / 2, TOP + HEIGHT + 34, "samples"))
    return elements


def plot(panels: Sequence[Panel]) -> str:
    """Return the figure: training loss against samples, with one panel per model."""
    labels = list(dict.fromkeys(label for panel in panels for label in panel.curves))
    colours = {label: COLOURS[index % len(COLOURS)] for index, label in enumerate(labels)}
    width = LEFT + len(panels) * (WIDTH + GAP)
    height = TOP + HEIGHT + 75
    elements = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        "<title>Training loss against samples</title>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for index, panel in enumerate(panels):
        elements += drawn(panel, colours, LEFT + index * (WIDTH + GAP))
    position = LEFT
    for label in labels:
        elements.append(f'<path d="M{position},{height - 20}h18" stroke="{colours[label]}" stroke-width="2.5"/>')
        elements.append(text(position + 24, height - 16, label, "start"))
        position += 50 + 7 * len(label)
    return "\n".join([*elements, "</svg>"]) + "\n"
