"""PipeDream's profile format, and plans with PipeDream's own cost model."""
