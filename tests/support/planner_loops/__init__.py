"""Searches of the planner as plain loops, to compare with."""
