"""The search for the best plan, without and with replicas."""
