"""Hosts with a network of their own, and the launchers of clusters, for the tests on several hosts."""
