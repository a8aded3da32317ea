"""Measurements of this machine: links between ranks, and what the runtime costs."""
