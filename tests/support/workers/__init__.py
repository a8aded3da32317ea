"""Functions for another process, as ``commands.apart`` runs them."""
