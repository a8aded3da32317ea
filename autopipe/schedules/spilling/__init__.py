"""Stages that take turns on a device: the pass that lets them, its rules, its memory, and its copies in time."""
