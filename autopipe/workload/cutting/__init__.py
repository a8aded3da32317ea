"""How a batch is cut into microbatches: which dimension of each tensor counts the samples."""

from autopipe.workload.cutting.dimensions import BatchDimensions

__all__ = ["BatchDimensions"]
