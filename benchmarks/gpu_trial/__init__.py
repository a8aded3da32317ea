"""Trials for a machine with one or more GPUs: ``make gpu-trial``."""
