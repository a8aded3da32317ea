"""The process of a rank: its first line, heartbeat, signals and end."""
