"""Operations and their rates, for tables and the summary of a run."""

from __future__ import annotations

from autopipe.ir.profile import Measurement, Profile
from autopipe.planning.clusters import precision_of
from autopipe.planning.cost.datasheets import utilization
from autopipe.report.results import TrainResult
from autopipe.units import in_flops


def of_measurement(profile: Profile, measurement: Measurement) -> tuple[float, float | None]:
    """Return the model FLOP/s of a microbatch on the profiled device, and its MFU; (0, None) where nothing is timed.

    ``planning.cost.datasheets.utilization`` defines the MFU.
    """
    costs = measurement.costs.values()
    seconds = sum(cost.forward_seconds + cost.backward_seconds for cost in costs)
    if not seconds or not measurement.model_flops:
        return 0.0, None
    rate = measurement.model_flops / seconds
    return rate, utilization(rate, profile.device.name, precision_of(profile))


def cells(profile: Profile, measurement: Measurement) -> tuple[str, str]:
    """Return the operations of a microbatch and their rate, as texts."""
    rate, mfu = of_measurement(profile, measurement)
    share = "" if mfu is None else f" ({mfu:.1%} of the peak)"
    return in_flops(measurement.model_flops), f"{in_flops(rate)}/s{share}" if rate else "-"


def of_run(result: TrainResult) -> str:
    """Return the sentence on the rate of a run, or "" if its operations are not known."""
    rate = result.device_flops_per_second
    if not rate:
        return ""
    share = "" if result.mfu is None else f", {result.mfu:.1%} of the datasheet's peak (MFU)"
    return f"\n{in_flops(rate)}/s a rank{share}"
