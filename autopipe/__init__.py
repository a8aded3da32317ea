"""autopipe: existing PyTorch models, unchanged, trained over many GPUs in pipeline stages."""

__version__ = "0.1.0"
