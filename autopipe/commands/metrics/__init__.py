"""The figures of a run while it trains: files, the hooks of the user, and the loggers of other tools."""
