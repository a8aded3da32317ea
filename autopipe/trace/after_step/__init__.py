"""Analyse the hook ``after_step(named_parameters, step)``: its changes, and their dependencies."""

from autopipe.trace.after_step.effects import effects_of
from autopipe.trace.after_step.flow import Flow

__all__ = ["Flow", "effects_of"]
