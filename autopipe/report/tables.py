"""Results as human-readable tables and lines, as rich renderables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from autopipe.errors import counted
from autopipe.ir.cluster import Cluster
from autopipe.ir.microbatch_loss import COUPLED, in_percent
from autopipe.ir.plan import Plan, Stage, bytes_by_rank
from autopipe.ir.profile import Profile
from autopipe.report import grids, rates
from autopipe.report.text import in_ranges
from autopipe.units import in_bytes, in_seconds

_RECOMPUTED = {"never": "", "block": " (recompute by block)", "stage": " (recompute)"}

if TYPE_CHECKING:
    from autopipe.commands.doctor import Examination
    from autopipe.report.results import (
        CheckReport,
        EvaluateResult,
        ExportResult,
        FullBatchReport,
        ParameterError,
        SimulateResult,
    )

WORST_PARAMETERS = 8


def new_table(title: str, *columns: str, left: int = 1) -> Table:
    """Return an empty table; the first ``left`` columns hold text, the others numbers."""
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right", overflow="fold")
    return table


def profile_table(profile: Profile) -> Table:
    """Return one row per measured microbatch size."""
    device = f"{profile.device.name}, {counted(profile.device.threads, 'thread')}"
    table = new_table(
        f"{profile.graph.name} on {device if profile.device.kind == 'cpu' else profile.device.name}",
        "microbatch",
        "forward",
        "backward",
        "outputs",
        "kept for backward",
        "workspace",
        "spread",
        "operations",
        "rate",
        left=0,
    )
    for measurement in profile.measurements:
        costs = measurement.costs.values()
        table.add_row(
            str(measurement.microbatch_size),
            in_seconds(sum(cost.forward_seconds for cost in costs)),
            in_seconds(sum(cost.backward_seconds for cost in costs)),
            in_bytes(sum(cost.output_bytes for cost in costs)),
            in_bytes(sum(cost.saved_bytes for cost in costs)),
            in_bytes(max((cost.workspace_bytes for cost in costs), default=0)),
            f"{measurement.spread:.1%}",
            *rates.cells(profile, measurement),
        )
    return table


def optimizer_line(profile: Profile) -> str:
    """Return the time and the state of the optimizer, for the complete model."""
    trained = profile.trained_bytes
    return (
        f"optimizer: {in_seconds(profile.optimizer_seconds_per_byte * trained)} a step for "
        f"{in_bytes(trained)} of parameters, and {in_bytes(profile.optimizer_bytes_per_byte * trained)} of state"
    )


def block_table(profile: Profile, most: int = 12) -> Table:
    """Return one row per block of the model, for the ``most`` most expensive, in execution order."""
    from autopipe.report.frames import block_frame

    frame = block_frame(profile)
    shown = frame.loc[frame.index.isin(frame.nlargest(most, "share").index)]
    size = profile.measurements[-1].microbatch_size
    table = new_table(
        f"by block, microbatch of {size}" + (f" (the largest {most} of {len(frame)})" if len(frame) > most else ""),
        "block",
        "forward",
        "backward",
        "outputs",
        "kept",
        "workspace",
        "parameters",
        "share",
        left=1,
    )
    for block, row in shown.to_dict("index").items():
        table.add_row(
            str(block) or "(the model itself)",
            in_seconds(row["forward_seconds"]),
            in_seconds(row["backward_seconds"]),
            in_bytes(int(row["output_bytes"])),
            in_bytes(int(row["saved_bytes"])),
            in_bytes(int(row["workspace_bytes"])),
            in_bytes(int(row["parameter_bytes"])),
            f"{row['share']:.1%}",
        )
    return table


def stage_table(plan: Plan, cluster: Cluster) -> Table:
    """Return one row per stage: its modules, the time of a microbatch, its memory, and the bytes that it sends.

    What is to spare is what all stages of a rank leave of its device.
    """
    members = f" of {plan.team} members" if plan.team > 1 else ""
    table = new_table(
        f"{counted(len(plan.stages), 'stage')} on {counted(plan.num_ranks, 'rank')}{members}, {plan.schedule}, "
        f"{counted(plan.num_microbatches, 'microbatch')} of {plan.microbatch_size}",
        "stage",
        "ranks",
        "modules",
        "a microbatch",
        "memory",
        "to spare",
        "sends",
        left=3,
    )
    used = bytes_by_rank(plan.stages)
    for stage in plan.stages:
        sent = sum(b.bytes * len(b.consumers) for b in plan.boundaries if b.producer == stage.index)
        table.add_row(
            str(stage.index),
            in_ranges(stage.ranks),
            stage.name + _RECOMPUTED[stage.recompute],
            in_seconds(stage.seconds),
            in_bytes(stage.peak_bytes),
            _to_spare(stage, used, cluster),
            in_bytes(sent) if sent else "-",
        )
    return table


def prediction_lines(plan: Plan, alone: Plan | None, *, estimated: bool = False) -> str:
    """Return the prediction of a plan, compared with the plan of one rank if there is one.

    ``estimated``: the times come from a datasheet.
    """
    predicted = plan.predicted
    one = alone.predicted.step_seconds if alone is not None else 0.0
    lines = [
        f"{'estimated' if estimated else 'predicted'}: {in_seconds(predicted.step_seconds)} a step, "
        f"{predicted.samples_per_second:.1f} samples/s, "
        f"{predicted.bubble_fraction:.1%} idle, slowest stage {in_seconds(predicted.bottleneck_seconds)} a microbatch",
    ]
    if one and predicted.step_seconds and plan.num_ranks > 1:
        ratio = one / predicted.step_seconds
        speed = f"slower than one rank ({ratio:.2f}x)" if ratio < 1 else f"{ratio:.2f} times as fast"
        lines.append(f"one rank alone: {in_seconds(one)} a step; this plan is {speed}")
    for tie in plan.ties:
        copies = ", ".join(str(copy) for copy in tie.copies)
        how = "bit-equal to plain training" if tie.exact else "the copies' sums are added once a step"
        lines.append(f"tied: {tie.parameter} lives in stage {tie.owner}, copied to {copies} ({how})")
    return "\n".join(lines)


def simulation(result: SimulateResult, width: int = 0) -> tuple[Any, ...]:
    """Return the schedule as a grid, the prediction of a step, and the memory of each stage.

    ``width``: the columns of a terminal that shows the grid in colours and in parts that fit; 0: as plain text.
    """
    plan, timeline = result.plan, result.timeline
    predicted = plan.predicted
    busy = ", ".join(f"{timeline.busy_seconds(rank) / (timeline.seconds or 1):.0%}" for rank in range(plan.num_ranks))
    step = (
        f"simulated: {in_seconds(predicted.step_seconds)} a step, {predicted.samples_per_second:.1f} samples/s, "
        f"{predicted.bubble_fraction:.1%} idle"
    )
    lines = [f"{step}; ranks busy {busy}"]
    if result.overlaps:
        lines = [
            f"{step}, once the pipeline is full: steps overlap",
            f"the first minibatch alone, which fills it and drains it: {in_seconds(timeline.seconds)}, "
            f"{timeline.bubble_fraction:.1%} idle; ranks busy {busy}",
        ]
    return (
        f"{plan.schedule}, {counted(len(plan.stages), 'stage')}, {counted(plan.num_microbatches, 'microbatch')}:",
        *(grids.for_terminal(result.grid, width) if width else (result.grid.rstrip("\n"),)),
        *lines,
        _memory(plan, result.cluster),
    )


def _memory(plan: Plan, cluster: Cluster) -> Table:
    """Return one row per stage: its peak memory, and the free memory of its device with all stages on it."""
    used = bytes_by_rank(plan.stages)
    table = new_table(f"memory with {plan.schedule}", "stage", "ranks", "modules", "at most", "to spare", left=3)
    for stage in plan.stages:
        spare = _to_spare(stage, used, cluster)
        table.add_row(str(stage.index), in_ranges(stage.ranks), stage.name, in_bytes(stage.peak_bytes), spare)
    return table


def _to_spare(stage: Stage, used: Mapping[int, int], cluster: Cluster) -> str:
    """Return the free memory of the fullest device of a stage, with all stages of that device."""
    rank = max(stage.ranks, key=lambda rank: used[rank])
    limit = cluster.memory_of(rank)
    left = limit - used[rank]
    return "no limit" if not limit else in_bytes(left) if left >= 0 else f"{in_bytes(-left)} too much"


def check(report: CheckReport) -> tuple[Any, ...]:
    """Return the verdict, the parameters with the largest errors, and the reference of the comparison."""
    verdict = _verdict(report)
    if report.full_batch is None:
        return verdict
    return (*verdict, compared_with(report.full_batch), *_full_batch(report.full_batch))


def compared_with(full: FullBatchReport) -> str:
    """Return the reference of the comparison, and the difference between it and a full batch."""
    sizes = str(max(full.samples)) if len(set(full.samples)) == 1 else f"{min(full.samples)} to {max(full.samples)}"
    if full.microbatches == 1:
        return f"compared with plain training over whole batches of {sizes}"
    text = f"compared with plain accumulation over {full.microbatches} microbatches of {sizes}"
    weighted = "" if full.divisor == "the samples" else f", weighted by {full.divisor}"
    error = "has no finite gradient" if full.error is None else f"differs by {_amount(full.error)}"
    if full.reason:
        error = f"was not compared ({full.reason})"
    text_of_all = f"{text}{weighted}; the full batch {error}"
    if not full.statistics:
        return text_of_all
    layers = counted(len(full.statistics), "layer")
    relation = "with" if full.parameters else "apart from"
    return f"{text_of_all}, {relation} the batch statistics of {layers}, which are those of each microbatch"


def _amount(error: float) -> str:
    """Return a relative difference: rounding as a power of ten, more than that in percent."""
    return in_percent(error) if error >= COUPLED else f"{error:.0e}"


def _over(report: CheckReport) -> str:
    """Return over which microbatches the plain loop accumulates, or "" if it has whole minibatches."""
    count = 1 if report.full_batch is None else report.full_batch.microbatches
    return f", over the same {count} microbatches" if count > 1 else ""


def _full_batch(full: FullBatchReport) -> tuple[Any, ...]:
    if not full.parameters:
        return ()
    table = new_table("one step of the full batch", "parameter", "gradient", "weight after the step")
    for entry in full.parameters:
        errors = (entry.gradient_error, entry.weight_error)
        table.add_row(entry.name, *("not a number" if error is None else f"{error:.3g}" for error in errors))
    return (table,)


# above this ratio of the difference in weights to that in gradients, the optimizer has enlarged the difference
_ENLARGED = 4.0


def _verdict(report: CheckReport) -> tuple[Any, ...]:
    if report.bitwise:
        what = "equal to plain training, to the last bit"
        if report.orders:
            what = "equal, to the last bit, to plain training that adds in the plan's order"
        verdict = f"{what}{_over(report)}: {counted(len(report.parameters), 'tensor')}, {_losses(report)}"
        return (f"{verdict}\n{_order(report)}" if report.orders else verdict,)
    word = f"equal to plain training within rounding{_over(report)}" if report.equal else "NOT equal to plain training"
    if report.nonfinite:
        word = f"NOT proven, {report.nonfinite}"
    shown = [e for e in report.parameters if not report.equal or e.error <= report.max_relative_error]
    worst = sorted(shown, key=lambda entry: (-entry.error, entry.name))[:WORST_PARAMETERS]
    table = new_table("largest differences", "parameter", "stage", "relative error", left=2)
    for entry in worst:
        table.add_row(entry.name, _stage_of(entry, report), f"{entry.error:.3g}")
    verdict = f"{word}: largest relative error {report.max_relative_error:.3g}, {_losses(report)}"
    if report.cause and report.max_relative_error == 0:  # found by the optimizer's probe, not by these steps
        return (f"{word}\n{report.cause}",)
    if report.equal:
        verdict += (
            f"\nallowed: {report.gradient_tolerance:.1e} in gradients, {report.tolerance:.1e} in weights; gradients "
            f"differ by {report.gradient_error:.1e} at most"
        )
        verdict += _enlarged(report.gradient_error, report.max_relative_error)
    return (verdict, table, *([report.cause] if report.cause else []))


def _stage_of(entry: ParameterError, report: CheckReport) -> str:
    """Return the index of the stage that owns a parameter, followed by the modules of the stage."""
    name = report.modules[entry.owner] if 0 <= entry.owner < len(report.modules) else ""
    return f"{entry.owner} ({name})" if name else str(entry.owner)


def _order(report: CheckReport) -> str:
    """Return the difference between the plan's order of sums and one process's, in gradients and in weights."""
    gradient = max(report.parameters, key=lambda entry: entry.order_gradient)
    weight = max(report.parameters, key=lambda entry: entry.order_weight)
    if not gradient.order_gradient and not weight.order_weight:
        return (
            f"that order differs from one process's: {'; '.join(report.orders)}\n"
            f"in these steps both give the same gradients and weights{_plain_order(report)}"
        )
    rounding = f"by up to {gradient.order_gradient:.1e} ({gradient.name})" if gradient.order_gradient else "by nothing"
    return (
        f"that order differs from one process's: {'; '.join(report.orders)}\n"
        f"the first step's gradients differ {rounding}, the weights "
        f"after {_losses(report)} by up to {weight.order_weight:.1e} ({weight.name})"
        f"{_enlarged(gradient.order_gradient, weight.order_weight)}{_plain_order(report)}"
    )


def _plain_order(report: CheckReport) -> str:
    """Return the options with which a plan adds in one process's order."""
    options = (("is tied over", "--exact-ties always"), ("are replicated", "--replicas never"))
    given = [option for words, option in options if any(words in reason for reason in report.orders)]
    return f"\n{' '.join(given)} adds in the order of one process" if given else ""


def _enlarged(gradient: float, weight: float) -> str:
    """Return the reason why weights differ by more than gradients, or "" if they do not."""
    if not gradient or weight <= _ENLARGED * gradient:
        return ""
    return (
        f", {weight / gradient:.0f} times as much: an optimizer that divides by the size of the gradient, such as "
        "Adam, enlarges rounding differences of gradients near zero"
    )


def _losses(report: CheckReport) -> str:
    return counted(len(report.losses), "step")


def evaluation(result: EvaluateResult) -> str:
    """Return the evaluation in one line."""
    return (
        f"loss {result.loss:.6f} over {counted(result.samples, 'sample')}, weights of step {result.step}, "
        f"in {in_seconds(result.seconds)}"
    )


def exported(result: ExportResult) -> str:
    """Return the line for an export."""
    return (
        f"{result.path}: {counted(result.tensors, 'tensor')}, {in_bytes(result.bytes)}, weights of step {result.step}"
    )


def findings(result: Examination) -> Table:
    """Return one row per finding of ``doctor``."""
    elsewhere = any(finding.host for finding in result.findings)
    table = new_table("the hosts" if elsewhere else "this machine", "", "what", "found", "try", left=4)
    for finding in result.findings:
        name = f"{finding.host}: {finding.name}" if finding.host else finding.name
        table.add_row({"ok": "ok", "note": "-", "problem": "!!"}[finding.state], name, finding.detail, finding.fix)
    return table
