"""Plan to schedule: pure functions that make rows of instructions, and what checks, lowers, simulates and draws."""

from autopipe.schedules.costs import Costs, EdgeCosts, StageCosts
from autopipe.schedules.kind import Option, ScheduleKind
from autopipe.schedules.lower import lower
from autopipe.schedules.registry import REGISTRY, make
from autopipe.schedules.render import render, render_timeline
from autopipe.schedules.simulate import simulate
from autopipe.schedules.validate import validate

__all__ = [
    "REGISTRY",
    "Costs",
    "EdgeCosts",
    "Option",
    "ScheduleKind",
    "StageCosts",
    "lower",
    "make",
    "render",
    "render_timeline",
    "simulate",
    "validate",
]
