"""What ``pip install`` installs: every package of the source tree."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_folder_with_an_init_is_installed():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    folders = [path.parent.relative_to(ROOT) for path in (ROOT / "autopipe").rglob("__init__.py")]
    packages = {".".join(folder.parts) for folder in folders}
    mapped = {name for name, folder in settings["package-dir"].items() if (ROOT / folder / "__init__.py").is_file()}
    assert mapped == {"autopipe.cli"}
    assert sorted(settings["packages"]) == settings["packages"] == sorted(packages | mapped)


def test_every_module_is_in_a_package():
    folders = {path.parent for part in ("autopipe", "cli") for path in (ROOT / part).rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []
