"""Check unmodified models of public repositories with ``autopipe check``."""
