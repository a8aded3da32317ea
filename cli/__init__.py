"""The command line: parses, calls one function of the workflow, prints. Installed as ``autopipe.cli``."""
