"""Stages that take turns on one device, with their weights and optimizer state in host memory."""
