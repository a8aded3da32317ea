"""The process of a stage of ``autopipe run``."""
