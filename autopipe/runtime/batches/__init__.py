"""Minibatches on a rank: who reads them, and which recording they follow."""
