"""The data types that pass between the steps: frozen and validated. They need no torch, and import only ``errors``."""
