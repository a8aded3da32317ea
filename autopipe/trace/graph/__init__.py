"""The recorded ``fx.Graph`` as ``ir.Graph`` and as a ``GraphModule`` that runs."""
