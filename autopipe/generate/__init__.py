"""Generate one readable Python file per stage from a captured model and a plan. The ranks run these files."""

from autopipe.generate.loader import load_constants, load_divisor, load_stage
from autopipe.generate.parts import inputs_of_stages
from autopipe.generate.write import generate

__all__ = ["generate", "inputs_of_stages", "load_constants", "load_divisor", "load_stage"]
