"""The recorder: one pass over the user's loss with fake tensors, as an ``fx.Graph`` of the calls it makes."""
