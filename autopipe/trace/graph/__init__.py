"""Convert the recorded ``fx.Graph`` to an ``ir.Graph`` and to a ``GraphModule``."""
