"""Checkpoints: the manifest, writing while training goes on, and weights from other formats."""
