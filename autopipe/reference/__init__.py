"""Plain training: one process, one model, one loop. ``check`` and audits run it, ``autopipe plain`` writes its files.

Its modules import torch and numpy only, and share no code with the ranks. docs/semantics.md defines what they compute.
"""
