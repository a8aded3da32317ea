"""The hooks of a model file: optimizer, loss and the others, each checked before use."""
