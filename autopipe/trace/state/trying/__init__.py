"""Runs with the values of later steps, isolated from files, output and large amounts of memory."""
