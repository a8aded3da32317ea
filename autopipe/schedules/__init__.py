"""Schedules: pure functions from a plan's layout to rows of instructions, and their validation and simulation."""

from autopipe.schedules.costs import Costs, EdgeCosts, StageCosts
from autopipe.schedules.custom import layout_of, lines_of, to_csv
from autopipe.schedules.kind import Option, ScheduleKind
from autopipe.schedules.lower import Turn, lower, turns
from autopipe.schedules.memory import MessageBytes, StageBytes, peak_bytes, stage_peaks
from autopipe.schedules.registry import REGISTRY, make, register
from autopipe.schedules.render import render, render_timeline
from autopipe.schedules.seconds import Program, Totals, least_seconds
from autopipe.schedules.simulate import simulate
from autopipe.schedules.validate import validate

__all__ = [
    "REGISTRY",
    "Costs",
    "EdgeCosts",
    "MessageBytes",
    "Option",
    "Program",
    "ScheduleKind",
    "StageBytes",
    "StageCosts",
    "Totals",
    "Turn",
    "layout_of",
    "least_seconds",
    "lines_of",
    "lower",
    "make",
    "peak_bytes",
    "register",
    "render",
    "render_timeline",
    "simulate",
    "stage_peaks",
    "to_csv",
    "turns",
    "validate",
]
