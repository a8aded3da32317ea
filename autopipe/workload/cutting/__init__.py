"""How a batch is cut into microbatches: which dimension of each tensor counts the samples."""
