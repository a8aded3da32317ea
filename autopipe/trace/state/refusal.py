"""The words of the errors for state that is changed and read."""

from __future__ import annotations

FORWARD = "the forward or the loss"
KEEP = "make it a buffer (register_buffer) that torch operations update, or a tensor of the batch"
