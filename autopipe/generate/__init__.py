"""A captured model and a plan to one readable Python file a stage. What is written is what runs."""

from autopipe.generate.loader import load_constants, load_divisor, load_stage
from autopipe.generate.write import generate

__all__ = ["generate", "load_constants", "load_divisor", "load_stage"]
