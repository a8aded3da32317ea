"""Measurements of this machine: links between ranks, and the overhead of the runtime."""
