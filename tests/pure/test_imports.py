"""The rules of the layout, read off the imports."""

import ast
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = sorted([*(ROOT / "autopipe").rglob("*.py"), *(ROOT / "cli").rglob("*.py")])
NO_TORCH = ("errors", "ir", "planning", "schedules", "report")
# a part -> the parts of autopipe that it may import; parts not named may import any
MAY_IMPORT = {
    "errors": set(),
    "ir": {"errors"},
    "planning": {"errors", "ir"},
    "schedules": {"errors", "ir"},
    "trace": {"errors", "ir", "draws", "workload", "guards", "sparse"},
    "measure": {"errors", "ir", "draws", "sparse"},
    "generate": {"errors", "ir", "draws", "stage", "guards", "sparse"},
    "draws": set(),
    "sparse": set(),
    "guards": {"errors", "ir"},
    "stage": {"errors", "ir", "draws", "guards"},
    "workload": {"errors", "ir", "draws"},
    "report": {"errors", "ir", "schedules"},
}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def part_of(path: Path) -> str:
    """The part of the product that a file belongs to: its folder below autopipe, or its own name there."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return "cli" if parts[0] == "cli" else parts[1]


def typing_only(tree: ast.AST) -> set[ast.AST]:
    """What stands under `if TYPE_CHECKING`: it is read by mypy alone."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            found.update(inner for child in node.body for inner in ast.walk(child))
    return found


def imports(path: Path) -> list[str]:
    """Every module that a file imports when it runs, as dotted names."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = typing_only(tree)
    found = []
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            found.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.append(node.module or "")
            found.extend(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def top_imports(path: Path) -> list[str]:
    """What a file imports when it is imported itself: not inside functions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inner = {n for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for n in ast.walk(f)} | typing_only(tree)
    found = []
    for node in ast.walk(tree):
        if node in inner:
            continue
        if isinstance(node, ast.Import):
            found.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.append(node.module or "")
    return found


def uses(module: str, name: str) -> bool:
    return module == name or module.startswith(name + ".")


def in_parts(parts: tuple[str, ...]) -> list[Path]:
    return [path for path in PRODUCT if part_of(path) in parts]


def offenders(paths: list[Path], found: Callable[[Path], Iterable[object]]) -> list[str]:
    """The files in which something is found, with what it is."""
    return [f"{name_of(path)}: {', '.join(map(str, what))}" for path in paths if (what := sorted(found(path), key=str))]


def calls(path: Path) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]


def importing(*names: str) -> Callable[[Path], Iterable[str]]:
    return lambda path: {module for module in imports(path) if any(uses(module, name) for name in names)}


def test_there_is_a_product_to_look_at():
    assert len(PRODUCT) > 60


def test_what_is_pure_imports_no_torch():
    assert offenders(in_parts(NO_TORCH), importing("torch")) == []


def test_a_part_imports_only_the_parts_below_it():
    def above(path: Path) -> set[str]:
        part = part_of(path)
        return {m.split(".")[1] for m in imports(path) if m.startswith("autopipe.")} - MAY_IMPORT[part] - {part}

    assert offenders(in_parts(tuple(MAY_IMPORT)), above) == []


def test_only_the_command_line_imports_click_and_nothing_imports_the_command_line():
    library = [path for path in PRODUCT if part_of(path) != "cli"]
    assert offenders(library, importing("click", "autopipe.cli", "cli")) == []


def test_only_the_transport_and_the_launchers_import_torch_distributed():
    # torch's format of checkpoints is part of its distributed package, and needs no ranks
    allowed = ("autopipe.runtime.distributed", "autopipe.runtime.dcp")
    others = [p for p in PRODUCT if name_of(p) not in allowed and part_of(p) != "launch"]
    assert offenders(others, importing("torch.distributed")) == []


def test_the_command_line_imports_torch_only_when_a_command_runs():
    heavy = (
        "torch",
        "numpy",
        "pandas",
        "rich",
        "autopipe.workflow.steps",
        "autopipe.workflow.runs",
        "autopipe.schedules",
    )

    def early(path: Path) -> set[str]:
        return {module for module in top_imports(path) if any(uses(module, name) for name in heavy)}

    assert offenders(in_parts(("cli",)), early) == []


def test_no_file_is_longer_than_400_lines():
    lengths = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in PRODUCT}
    assert {name: length for name, length in lengths.items() if length > 400} == {}


def test_nothing_unpickles_or_runs_a_shell():
    forbidden = {("shell", True), ("weights_only", False)}

    def found(path: Path) -> set[object]:
        given = [k for call in calls(path) for k in call.keywords if isinstance(k.value, ast.Constant)]
        return {(k.arg, k.value.value) for k in given if (k.arg, k.value.value) in forbidden}

    assert offenders(PRODUCT, found) == []
    assert offenders(PRODUCT, importing("pickle", "cloudpickle", "dill", "shelve")) == []


def test_the_library_neither_prints_nor_exits():
    def found(path: Path) -> set[str]:
        return {ast.unparse(call.func) for call in calls(path)} & {"print", "exit", "quit", "sys.exit"}

    assert offenders([path for path in PRODUCT if part_of(path) != "cli"], found) == []


def test_help_loads_none_of_the_heavy_packages():
    # a process of its own: this one has imported them long ago
    code = (
        "import sys\n"
        "from autopipe.cli.main import autopipe\n"
        "try:\n    autopipe(['--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "print([name for name in ('torch', 'numpy', 'pandas', 'rich', 'numba') if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60, cwd=ROOT
    )
    assert done.stdout.splitlines()[-1] == "[]"
