"""``autopipe plan``: from a request to a plan."""
