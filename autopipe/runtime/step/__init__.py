"""The end of a minibatch: gradients reduced, scaled, clipped and applied."""
