"""One function per command, and the steps that they share: load, capture, measure, plan, generate, simulate, run.

Each function reads and writes artifacts in the work directory, and repeats only the steps that are missing or stale.
Nothing in this package prints.
"""
