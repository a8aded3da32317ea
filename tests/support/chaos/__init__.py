"""Single faults at random to whole runs, and the judgement of what followed: ``make chaos``."""
