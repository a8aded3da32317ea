"""What the script sees of the model: parameters, gradients, optimizer state. The newest values are on the ranks."""
