"""Profiles in PipeDream's format, and plans under PipeDream's own cost model."""
