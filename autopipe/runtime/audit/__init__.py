"""Audits: single steps of a run, computed again by the plain loop from the run's own weights and batch."""
