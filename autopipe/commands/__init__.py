"""The chain of steps behind the commands: load, capture, measure, plan, generate, simulate, and the runs.

One function a command. Each reads and writes artifacts in the work directory and does again only what is missing or
stale. Nothing here prints.
"""
