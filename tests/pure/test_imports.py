"""The rules of the layout: imports, files and folders, the size of the product, and who has a mechanism of its own.

``layout.toml`` has the lines, files, mechanisms and circles that are allowed. Lower them with what you remove.
"""

import ast
import functools
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from support.stored_profiles import stored_profile

from autopipe.commands.planning.choose import choose_plan
from autopipe.commands.store import Work
from autopipe.ir import artifact
from autopipe.planning.requests import PlanRequest

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = sorted([*(ROOT / "autopipe").rglob("*.py"), *(ROOT / "cli").rglob("*.py")])
FOLDERS = "tests", "benchmarks", "docs"
SOURCE = sorted([*PRODUCT, *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))])
LIMITS = tomllib.loads(Path(__file__).with_name("layout.toml").read_text(encoding="utf-8"))
SLACK = 150
"""Lines by which a limit may lie above what there is."""
NO_TORCH = ("errors", "options", "ir", "planning", "schedules", "report")
# part -> the parts of autopipe that it may import; cli may import all
_BASE = {"errors", "units", "ir"}
# needed by a forward in any process
_FORWARD = {
    *_BASE,
    "bits",
    "casts",
    "devices",
    "draws",
    "guards",
    "sequence",
    "sparse",
    "strides",
    "team",
    "users_code",
}
_RUN = {*_FORWARD, "cores", "stage", "schedules", "workload", "trace", "measure", "generate", "planning", "runtime"}
MAY_IMPORT = {
    "errors": set(),
    "units": {"errors"},
    "options": set(),
    "bits": set(),
    "cores": set(),
    "draws": set(),
    "casts": set(),
    "devices": set(),
    "sparse": set(),
    "strides": set(),
    "users_code": set(),
    "ir": {"errors", "units"},
    "capture_inputs": {"ir", "users_code"},
    "guards": {"errors", "ir"},
    "team": {"ir"},
    "sequence": {"errors", "strides", "team"},
    "stage": {"errors", "ir", "draws", "guards", "team"},
    "schedules": _BASE,
    "planning": {*_BASE, "cores", "options", "schedules"},
    "report": {*_BASE, "schedules", "planning"},
    "workload": {*_BASE, "bits", "draws", "sparse", "users_code"},
    "trace": {*_FORWARD, "workload"},
    "measure": {*_BASE, "casts", "devices", "draws", "sparse", "strides", "team"},
    "generate": {*_FORWARD, "stage"},
    "runtime": _RUN,
    "reference": set(),
    "verify": {*_RUN, "reference"},
    "workers": {"errors", "workload"},
    "user_modules": {"errors", "users_code", "workload"},
    "launch": {*_RUN, "report", "workers"},
    "script": {*_RUN, "launch", "workers"},
    "commands": {*_RUN, "capture_inputs", "options", "report", "verify", "workers", "launch", "script"},
    "sweep": {*_RUN, "options", "report", "verify", "workers", "launch", "commands"},
    "pipeline": {"errors", "options", "commands", "report", "user_modules", "workers"},
}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def module_of(path: Path) -> str:
    """Return the name under which a file is imported."""
    name = name_of(path).removesuffix(".__init__")
    return f"autopipe.{name}" if name == "cli" or name.startswith("cli.") else name


def part_of(path: Path) -> str:
    """Return the part of the product that a file belongs to: its folder in autopipe, or its own name there."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return "cli" if parts[0] == "cli" else parts[1]


def typing_only(tree: ast.AST) -> set[ast.AST]:
    """Return the nodes under `if TYPE_CHECKING`, which only mypy reads."""
    lines = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            lines.update(inner for child in node.body for inner in ast.walk(child))
    return lines


@functools.cache
def imports(path: Path, *, types: bool = False) -> list[str]:
    """Return all modules that a file imports when it runs, as dotted names; with ``types``, also those for types."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = set() if types else typing_only(tree)
    modules = []
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            modules.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            modules.append(node.module or "")
            modules.extend(f"{node.module}.{alias.name}" for alias in node.names)
    return modules


def top_imports(path: Path) -> list[str]:
    """Return the modules that a file imports at its top level, not inside functions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inner = {n for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for n in ast.walk(f)} | typing_only(tree)
    modules = []
    for node in ast.walk(tree):
        if node in inner:
            continue
        if isinstance(node, ast.Import):
            modules.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            modules.append(node.module or "")
    return modules


def uses(module: str, name: str) -> bool:
    return module == name or module.startswith(name + ".")


def in_parts(parts: tuple[str, ...]) -> list[Path]:
    return [path for path in PRODUCT if part_of(path) in parts]


def offenders(paths: list[Path], search: Callable[[Path], Iterable[object]]) -> list[str]:
    """Return the files in which the search finds something, with the findings."""
    offences = {name_of(path): sorted(search(path), key=str) for path in paths}
    return [f"{name}: {', '.join(map(str, items))}" for name, items in offences.items() if items]


def calls(path: Path) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]


def importing(*names: str) -> Callable[[Path], Iterable[str]]:
    return lambda path: {module for module in imports(path) if any(uses(module, name) for name in names)}


def test_the_product_has_files():
    assert len(PRODUCT) > 60


def test_pure_parts_import_no_torch():
    assert offenders(in_parts(NO_TORCH), importing("torch")) == []


def test_the_reference_imports_torch_numpy_and_python_only():
    def others(path: Path) -> set[str]:
        own = {"torch", "numpy", "safetensors", "autopipe"}
        return {m for m in imports(path) if m.partition(".")[0] not in sys.stdlib_module_names | own}

    assert in_parts(("reference",))
    assert offenders(in_parts(("reference",)), others) == []


def test_a_part_imports_only_the_parts_below_it():
    def above(path: Path) -> set[str]:
        part = part_of(path)
        named = {m.split(".")[1] for m in imports(path) if m.startswith("autopipe.")}
        return named - MAY_IMPORT[part] - {part, "__version__"}

    assert offenders(in_parts(tuple(MAY_IMPORT)), above) == []
    assert {part_of(path) for path in PRODUCT} - {"cli", "__init__"} == set(MAY_IMPORT)


def mechanisms(path: Path) -> Iterator[str]:
    """Yield the mechanisms that a file uses: modules of Python, trace functions, modes of torch."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for name in set(imports(path)):
        top = name.partition(".")[0]
        if top in LIMITS["mechanisms"]:
            yield top
    names = {node.attr if isinstance(node, ast.Attribute) else node.id for node in ast.walk(tree)
             if isinstance(node, (ast.Attribute, ast.Name))}  # fmt: skip
    if names & {"settrace", "setprofile"}:
        yield "trace functions"
    if names & {"TorchFunctionMode", "TorchDispatchMode", "FakeTensorMode"}:
        yield "modes"


def circles(*, types: bool) -> list[list[str]]:
    """Return the groups of modules that import each other. ``types``: also if only for types."""
    modules = {module_of(path): path for path in PRODUCT}
    below: dict[str, set[str]] = {}
    for name, path in modules.items():
        named = [m for m in imports(path, types=types) if m in modules and m != name]
        # `from package import module` names both; only the module counts
        below[name] = {m for m in named if not any(uses(other, m) and other != m for other in named)}
    reached = {name: _reached(name, below) for name in below}
    groups = {frozenset([name, *(m for m in reached[name] if name in reached[m])]) for name in below}
    return sorted(sorted(group) for group in groups if len(group) > 1)


def _reached(start: str, below: dict[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        new = below[waiting.pop()] - reached
        reached |= new
        waiting.extend(new)
    return reached


def check_limits(what: str, counts: Counter[str], limits: dict[str, int], slack: int) -> None:
    assert counts.keys() == limits.keys()
    above = {name: f"{count} {what}, {limits[name]} allowed" for name, count in counts.items() if count > limits[name]}
    assert above == {}, "remove something first"
    loose = {name: count for name, count in counts.items() if count < limits[name] - slack}
    assert loose == {}, "lower the limits in layout.toml"


def test_no_part_has_more_lines_than_it_may() -> None:
    lines: Counter[str] = Counter()
    for path in PRODUCT:
        lines[part_of(path)] += len(path.read_text(encoding="utf-8").splitlines())
    check_limits("lines", lines, LIMITS["lines"], SLACK)


def test_there_are_not_more_files_than_there_may_be() -> None:
    check_limits("files", Counter({"all": len(PRODUCT)}), LIMITS["files"], 5)


def test_each_mechanism_is_where_it_may_be() -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path in PRODUCT:
        for name in set(mechanisms(path)):
            places[name].append(module_of(path))
    assert {name: sorted(modules) for name, modules in places.items()} == LIMITS["mechanisms"]


def test_no_modules_need_each_other_when_they_are_imported() -> None:
    assert circles(types=False) == []


def test_the_circles_of_types_are_known() -> None:
    assert circles(types=True) == LIMITS["circles"]["of types"]


def test_no_folder_has_more_than_21_modules():
    folders = Counter(str(path.relative_to(ROOT).parent) for path in SOURCE if path.stem != "__init__")
    assert {folder: count for folder, count in folders.items() if count > 21} == {}


def test_only_the_command_line_imports_click_and_nothing_imports_the_command_line():
    library = [path for path in PRODUCT if part_of(path) != "cli"]
    assert offenders(library, importing("click", "autopipe.cli", "cli")) == []


def test_only_the_transport_and_the_launchers_import_torch_distributed():
    # torch's checkpoint format is part of its distributed package, and needs no ranks
    allowed = (
        "autopipe.runtime.transport.distributed",
        "autopipe.runtime.transport.nccl",
        "autopipe.runtime.checkpoint.dcp",
        "autopipe.commands.calibration.link_ranks",
    )
    others = [p for p in PRODUCT if name_of(p) not in allowed and part_of(p) != "launch"]
    assert offenders(others, importing("torch.distributed")) == []


def test_the_command_line_imports_torch_only_when_a_command_runs():
    heavy = (
        "torch",
        "numpy",
        "pandas",
        "rich",
        "autopipe.commands.artifact_steps",
        "autopipe.commands.training.runs",
        "autopipe.schedules",
    )

    def early(path: Path) -> set[str]:
        return {module for module in top_imports(path) if any(uses(module, name) for name in heavy)}

    assert offenders(in_parts(("cli",)), early) == []


def test_no_file_is_longer_than_400_lines():
    lengths = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCE}
    assert {name: length for name, length in lengths.items() if length > 400} == {}


def test_nothing_unpickles_or_runs_a_shell():
    forbidden = {("shell", True), ("weights_only", False)}

    def unsafe_keywords(path: Path) -> set[object]:
        given = [k for call in calls(path) for k in call.keywords if isinstance(k.value, ast.Constant)]
        return {(k.arg, k.value.value) for k in given if (k.arg, k.value.value) in forbidden}

    assert offenders(PRODUCT, unsafe_keywords) == []
    assert offenders(PRODUCT, importing("pickle", "cloudpickle", "dill", "shelve")) == []


def test_the_library_neither_prints_nor_exits():
    def forbidden_calls(path: Path) -> set[str]:
        return {ast.unparse(call.func) for call in calls(path)} & {"print", "exit", "quit", "sys.exit"}

    assert offenders([path for path in PRODUCT if part_of(path) != "cli"], forbidden_calls) == []


def loaded_by(words: list[str], names: tuple[str, ...], folder: Path = ROOT) -> str:
    """Return which packages a command loads, and check that it succeeds. A process of its own: this one has them."""
    code = (
        "import sys\n"
        f"sys.path[:0] = [{str(ROOT)!r}]\n"
        "from autopipe.cli.main import autopipe\n"
        f"try:\n    autopipe({words!r})\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        f"print([name for name in {names!r} if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60, cwd=folder
    )
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize("words", [["runs"], ["runs", "--json"], ["show", "--help"]])
def test_a_look_at_runs_loads_neither_torch_nor_pandas(words, tmp_path):
    assert loaded_by(words, ("torch", "pandas", "safetensors"), tmp_path) == "[]"


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["plan", "--help"], ["doctor", "--help"]])
def test_help_loads_none_of_the_heavy_packages(words):
    assert loaded_by(words, ("torch", "numpy", "pandas", "rich")) == "[]"


def test_a_simulation_loads_neither_torch_nor_pandas(tmp_path):
    work, profile = Work.begin(tmp_path, None), stored_profile()
    artifact.save(profile, work.store.profile)
    choose_plan(profile, PlanRequest(gpus=2, link=1e10, gpu_memory_bytes=2**33), work, 16)
    assert loaded_by(["simulate", "--work-dir", str(tmp_path)], ("torch", "pandas")) == "[]"
