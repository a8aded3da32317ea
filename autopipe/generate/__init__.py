"""A captured model and a plan to one readable Python file a stage. What is written is what runs."""

from autopipe.generate.loader import load_constants, load_divisor, load_stage
from autopipe.generate.parts import inputs_of_stages
from autopipe.generate.write import generate

__all__ = ["generate", "inputs_of_stages", "load_constants", "load_divisor", "load_stage"]
