"""What the loss divides by, and whether the samples of a batch depend on one another."""
