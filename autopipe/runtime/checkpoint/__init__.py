"""Checkpoints: the manifest, background writing, and weights from other formats."""
