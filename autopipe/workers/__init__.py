"""Processes that run a function of a module for this one, and the fork server that they are forked from."""
