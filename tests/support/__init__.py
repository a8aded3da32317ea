"""Helpers shared by tests: cases, oracles, and commands in separate folders."""
