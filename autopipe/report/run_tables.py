"""The tables of ``runs`` and ``show``, and of the result of a run."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from autopipe.errors import counted
from autopipe.report import rates
from autopipe.report.results import TrainResult
from autopipe.report.run_results import RunAttempt, RunCheckpoint, RunDetails, RunRow, RunStage
from autopipe.report.tables import new_table
from autopipe.report.text import in_minutes, in_ranges
from autopipe.units import in_bytes, in_seconds

_STYLES = {"running": "cyan", "finished": "green", "stopped": "yellow", "interrupted": "yellow", "failed": "red"}
_STYLES |= {"unreadable": "red"}
_BARS, _PLAIN_BARS = "▁▂▃▄▅▆▇█", "_.-~=+*#"
SPARKLINE = 60
# the columns that a narrow terminal lacks, the first ones first
_LESS_IMPORTANT = "samples/s", "checkpoint", "schedule", "loss", "updated"
_MOST_LINES = 5


def overview(rows: Sequence[RunRow], now: float, width: int) -> tuple[Any, ...]:
    """Return a table with one row per run that fits ``width`` columns, and the reasons of runs that failed."""
    cells = [_cells(row, now) for row in rows]
    names = list(cells[0]) if cells else []
    for name in (*_LESS_IMPORTANT, ""):
        wide = [max(cell_len(name), *(cell_len(row[name]) for row in cells)) for name in names]
        if sum(wide) + 3 * len(wide) <= width:
            break
        names = [kept for kept in names if kept != name]
    table = new_table("", *names, left=2)
    for row, texts in zip(rows, cells, strict=True):
        table.add_row(*(Text(texts[name], _STYLES.get(row.state, "") if name == "state" else "") for name in names))
    return table, *(f"{row.name} {row.state}: {_first_line(row.reason)}" for row in rows if row.reason)


def _cells(row: RunRow, now: float) -> dict[str, str]:
    return {
        "run": row.name,
        "state": row.state,
        "model": model_name(row.target),
        "schedule": f"{row.schedule}, {counted(row.ranks, 'rank')}" if row.ranks else "",
        "step": f"{row.step}/{row.steps}" if row.steps else str(row.step),
        "loss": "" if row.loss is None else f"{row.loss:.4f}",
        "samples/s": "" if row.samples_per_second is None else f"{row.samples_per_second:.1f}",
        "checkpoint": "" if row.checkpoint is None else str(row.checkpoint),
        "updated": ago(now - row.updated),
    }


def model_name(target: str) -> str:
    """Return a TARGET without the folders of its file."""
    path, colon, attribute = target.rpartition(":") if ":" in target else (target, "", "")
    return f"{PurePath(path).name}{colon}{attribute}"


def ago(seconds: float) -> str:
    """Return a past time: ``12 min ago``, ``3 days ago``."""
    if seconds >= 2 * 86400:
        return f"{seconds / 86400:.0f} days ago"
    return f"{in_minutes(max(seconds, 0.0))} ago"


def details(shown: RunDetails, now: float, *, unicode: bool) -> tuple[Any, ...]:
    """Return everything about a run. ``unicode``: whether the terminal can show the characters of a sparkline."""
    row = shown.row
    head = (
        f"{row.name}: {row.state}, step {row.step}{f' of {row.steps}' if row.steps else ''}, {ago(now - row.updated)}"
    )
    return (
        head,
        *(f"  {_first_line(row.reason)}" for _ in range(bool(row.reason))),
        *(f"  damaged: {text}" for text in shown.damage if text != row.reason),
        *_option_lines(shown),
        *_losses(shown, unicode),
        *([_stages(shown.plan)] if shown.plan else []),
        *([_checkpoints(shown.checkpoints, now)] if shown.checkpoints else ["no checkpoint"]),
        *(line for attempt in shown.attempts[-_MOST_LINES:] for line in _attempt(attempt)),
    )


def _option_lines(shown: RunDetails) -> Iterator[str]:
    options, row = shown.options, shown.row
    yield f"  directory  {row.path}"
    if "target" in options:
        arguments = "".join(f" --arg {name}={value}" for name, value in options["arguments"].items())
        yield f"  model      {options['target']}{arguments}"
        hooks = ", ".join(f"{name} {target}" for name, target in options["hooks"].items())
        if hooks:
            yield f"  hooks      {hooks}"
        yield f"  optimizer  {options.get('chosen_optimizer') or _optimizer_of_options(options)}"
        size = f"{options['batch_size']} samples as {counted(options['num_microbatches'], 'microbatch')}"
        yield f"  batch      {size}, {options['precision']}, seed {options['seed']}"
        team = f" of {options['tensor_parallel']} members" if options["tensor_parallel"] > 1 else ""
        where = f"{counted(row.stages, 'stage')} on {counted(row.ranks, 'rank')}{team}, {row.schedule}"
        yield f"  plan       {where}, {options.get('device', '')}"
    extras = [
        f"--{name.replace('_', '-')}{'' if value is True else f' {value}'}"
        for name, value in options.items()
        if name in _EXTRAS and value != _EXTRAS[name]
    ]
    if extras:
        yield f"  options    {' '.join(extras)}"


def _optimizer_of_options(options: Mapping[str, Any]) -> str:
    """Return the optimizer of a run that does not record its choice."""
    rate = options["learning_rate"] if options.get("learning_rate") is not None else options["lr"]
    optimizer = options["optimizer"] or "that of the model file, or AdamW"
    return f"{optimizer}{'' if rate is None else f', lr {rate:g}'}"


# options of a job that are shown if they differ from their defaults
_EXTRAS: dict[str, Any] = {
    "clip_grad_norm": 0.0,
    "on_nonfinite": "stop",
    "deferred_batch_norm": False,
    "ema": 0.0,
    "compile": False,
    "init_from": "",
}


def _losses(shown: RunDetails, unicode: bool) -> Iterator[str]:
    losses = {step: loss for step, loss in shown.losses.items() if loss is not None}
    if losses:
        values = list(losses.values())
        least = min(losses, key=lambda step: losses[step])
        rate = shown.row.samples_per_second
        predicted = shown.predicted_samples_per_second
        of = f" (predicted: {predicted:.1f})" if predicted else ""
        yield (
            f"loss {values[0]:.6f} -> {values[-1]:.6f}, lowest {losses[least]:.6f} at step {least + 1}"
            f"{'' if rate is None else f'; {rate:.1f} samples/s{of}'}"
        )
        if len(values) > 1:
            yield f"  {sparkline(values, unicode=unicode)}"
    if missing := len(shown.losses) - len(losses):
        yield f"{counted(missing, 'step')} without a finite loss"
    evaluated = list(shown.evaluations.items())
    if evaluated:
        more = f"{len(evaluated)} evaluations, the last: " if len(evaluated) > _MOST_LINES else "evaluation loss: "
        texts = (f"{'not finite' if loss is None else f'{loss:.6f}'} at step {step}" for step, loss in evaluated)
        yield more + ", ".join(list(texts)[-_MOST_LINES:])
    if shown.audits:
        different = ", ".join(str(step + 1) for step in shown.unequal_audits)
        result = f"different in step {different}" if different else "all equal"
        yield f"{counted(shown.audits, 'step')} compared with plain training: {result}"


def sparkline(values: Sequence[float], *, unicode: bool, width: int = SPARKLINE) -> str:
    """Return a chart of one line. Each column is the mean of its values, between the least and the largest mean."""
    columns = min(width, len(values))
    edges = [len(values) * column // columns for column in range(columns + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    bars = _BARS if unicode else _PLAIN_BARS
    scale = (len(bars) - 1) / (high - low) if high > low else 0.0
    return "".join(bars[round((mean - low) * scale)] for mean in means)


def _stages(plan: Sequence[RunStage]) -> Table:
    measured = any(stage.measured_bytes is not None for stage in plan)
    names = ["stage", "ranks", "modules", "a microbatch", "memory, planned", *(["measured"] if measured else [])]
    table = new_table("", *names, left=3)
    for stage in plan:
        memory = [in_bytes(stage.planned_bytes)]
        if measured:
            memory.append("-" if stage.measured_bytes is None else in_bytes(stage.measured_bytes))
        table.add_row(str(stage.index), in_ranges(stage.ranks), stage.name, in_seconds(stage.seconds), *memory)
    return table


def _checkpoints(saved: Sequence[RunCheckpoint], now: float) -> Table:
    verified = any(checkpoint.intact is not None for checkpoint in saved)
    table = new_table("", "checkpoint of step", "size", "written", *(["intact"] if verified else []), left=0)
    for checkpoint in saved:
        cells = [str(checkpoint.step), in_bytes(checkpoint.bytes), ago(now - checkpoint.written)]
        if verified:
            cells.append("yes" if checkpoint.intact else f"no: {checkpoint.damage}")
        table.add_row(*cells)
    return table


def _attempt(attempt: RunAttempt) -> Iterator[str]:
    begin = datetime.datetime.fromtimestamp(attempt.began).strftime("%Y-%m-%d %H:%M:%S")
    end = "" if attempt.step is None else f" at step {attempt.step}"
    seconds = "" if attempt.ended is None else f", after {in_minutes(attempt.ended - attempt.began)}"
    state = "killed" if attempt.state == "interrupted" and attempt.ended is None else attempt.state
    yield (
        f"{begin} on {attempt.host}, {counted(attempt.ranks, 'rank')}, from step {attempt.start_step}: "
        f"{state}{end}{seconds}"
    )
    for restart in attempt.restarts:
        yield (
            f"  rank {restart.rank} failed at step {restart.reached + 1}: {_first_line(restart.what)} "
            f"({restart.where}); resumed from step {restart.from_step} on {counted(restart.ranks, 'rank')}"
        )
    if attempt.what and attempt.state == "failed":
        yield f"  {_first_line(attempt.what)}"
        if attempt.where:
            yield f"  at:  {_first_line(attempt.where)}"
        if attempt.remedy:
            yield f"  try: {_first_line(attempt.remedy)}"


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def result_tables(result: TrainResult) -> tuple[str | Table, ...]:
    """Return the summary of a run, the memory if it was measured, and the bytes copied if stages took turns."""
    return _summary(result), *_peaks(result), *_copied(result)


def _summary(result: TrainResult) -> str:
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
    if result.compared and result.compared_with:
        numbers += f" with {result.compared_with} of the model"
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
