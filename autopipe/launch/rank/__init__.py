"""The process of a rank: entry, heartbeat, signals and end."""
