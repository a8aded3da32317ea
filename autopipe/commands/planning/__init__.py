"""``autopipe plan``: a request becomes a plan, with the tables that explain it."""
