"""The nouns: frozen values that pass between the steps. No torch, no other part of autopipe but ``errors``."""
