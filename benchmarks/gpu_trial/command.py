"""The ``autopipe`` command of this checkout, also where the package is not installed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    """Run the command line."""
    sys.path[0] = str(ROOT)
    if importlib.util.find_spec("autopipe.cli") is None:
        folder = ROOT / "cli"
        spec = importlib.util.spec_from_file_location(
            "autopipe.cli", folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None and spec.loader is not None
        sys.modules["autopipe.cli"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    from autopipe.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
