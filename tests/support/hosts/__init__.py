"""Hosts with separate networks, and the launchers of clusters, for the tests on several hosts."""
