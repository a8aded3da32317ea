"""The result of a run, as text and tables."""

from __future__ import annotations

from rich.table import Table

from autopipe.errors import counted
from autopipe.report import rates
from autopipe.report.results import TrainResult
from autopipe.report.tables import new_table
from autopipe.units import in_bytes, in_seconds


def tables_of(result: TrainResult) -> tuple[str | Table, ...]:
    """Return the summary of a run, the memory if it was measured, and the bytes copied if stages took turns."""
    return summary(result), *_peaks(result), *_copied(result)


def summary(result: TrainResult) -> str:
    """Return the summary of a run."""
    if not result.losses:
        return f"all steps were done already (--steps N continues); run directory {result.run_dir}"
    return (
        f"{counted(result.steps, 'step')} in {in_seconds(result.seconds)} on {counted(result.ranks, 'rank')} "
        f"({counted(result.stages, 'stage')}, "
        f"{result.schedule}): loss {result.losses[0]:.6f} -> {result.losses[-1]:.6f}, "
        f"{result.samples_per_second:.1f} samples/s{_of_predicted(result)}{rates.of_run(result)}\n"
        f"checkpoint: {result.checkpoint or 'none'}{_slower(result)}"
    )


def proven(result: TrainResult) -> str:
    """Return a line that says how many steps are proven to equal plain training."""
    if result.unproven:
        return "no step of the run is proven: all audits that --audit-every requested were skipped"
    if not result.compared and not result.audits:
        return "no step of the run is proven: none was compared with plain training, and none audited"
    numbers = f"{result.compared or 'none'} of {counted(result.steps, 'step')} compared"
    return f"proven equal to plain training: {numbers}, {len(result.audits) or 'none'} audited"


def _of_predicted(result: TrainResult) -> str:
    """Return the predicted rate, to print after the measured one."""
    predicted = result.predicted_samples_per_second
    return f" (predicted: {predicted:.1f})" if predicted else ""


def _slower(result: TrainResult) -> str:
    return f"\n{result.slower}" if result.slower else ""


def _copied(result: TrainResult) -> tuple[Table, ...]:
    """Return the bytes that a step copied between host and device; () if stages did not take turns there."""
    if not result.copied:
        return ()
    table = new_table("copied a step", "to the", "measured", "planned")
    for direction in result.copied:
        table.add_row(direction.to, in_bytes(direction.bytes), in_bytes(direction.planned_bytes))
    return (table,)


def _peaks(result: TrainResult) -> tuple[Table, ...]:
    """Return one row per stage and rank of measured memory; () without a measurement."""
    if not result.peaks:
        return ()
    names = "modules", "stage", "rank", "at most", "planned", "between steps", "one version", "versions", "in flight"
    table = new_table("memory", *names)
    for peak in result.peaks:
        sizes = peak.bytes, peak.planned_bytes, peak.held_bytes, peak.weight_bytes
        name = result.modules[peak.stage] if peak.stage < len(result.modules) else ""
        counts = str(peak.versions), str(peak.in_flight)
        table.add_row(name, str(peak.stage), str(peak.rank), *map(in_bytes, sizes), *counts)
    return (table,)
