"""Constructs that the source of the product must not contain."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = sorted([*(ROOT / "autopipe").rglob("*.py"), *(ROOT / "cli").rglob("*.py")])
# stage files are the program: the loader runs their text, and --compile a rewritten form of it
MAY_EXECUTE = {"autopipe/generate/loader.py", "autopipe/runtime/compiled.py"}
PICKLERS = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
SHELLS = {
    "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "commands.getoutput",
    "asyncio.create_subprocess_shell", "pty.spawn",
}  # fmt: skip
EVALUATORS = {"eval", "exec", "compile", "__import__"}


def findings(path: Path) -> Iterator[str]:
    where = path.relative_to(ROOT).as_posix()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            if set(name.split(".")) & PICKLERS:
                yield f"{where}:{node.lineno} imports {name}"
        if isinstance(node, (ast.Attribute, ast.Name)):
            used = ast.unparse(node)
            if used in SHELLS:
                yield f"{where}:{node.lineno} uses {used}"
            if used.endswith(("_object_list", "all_gather_object", "gather_object", "_object_broadcast")):
                yield f"{where}:{node.lineno} sends objects: {used}"
        if isinstance(node, ast.Call):
            yield from (f"{where}:{node.lineno} {what}" for what in calls(node, where))


def calls(node: ast.Call, where: str) -> Iterator[str]:
    called = ast.unparse(node.func)
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    if given.get("shell", "False") != "False":
        yield "starts a shell"
    if called in ("torch.load", "load") and "torch" in called and given.get("weights_only") != "True":
        yield "unpickles with torch.load"
    if called in EVALUATORS and where not in MAY_EXECUTE:
        yield f"calls {called}"
    if called.rpartition(".")[2] in ("dcp_to_torch_save", "torch_save_to_dcp"):
        yield f"calls {called}, which unpickles"


def test_no_module_unpickles_starts_a_shell_or_runs_text():
    assert len(PRODUCT) > 100
    assert [what for path in PRODUCT for what in findings(path)] == []


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("import pickle", "imports pickle"),
        ("from torch.distributed.checkpoint import pickle", "imports"),
        ("import torch\ntorch.load(path)", "unpickles"),
        ("import torch\ntorch.load(path, weights_only=False)", "unpickles"),
        ("subprocess.run(text, shell=True)", "starts a shell"),
        ("subprocess.run(text, shell=flag)", "starts a shell"),
        ("os.system(text)", "uses os.system"),
        ("dist.broadcast_object_list(x)", "sends objects"),
        ("dist.all_gather_object(a, b)", "sends objects"),
        ("eval(text)", "calls eval"),
        ("exec(text)", "calls exec"),
    ],
)
def test_the_search_finds_every_forbidden_construct(text, shown, monkeypatch, tmp_path):
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    path = tmp_path / "bad.py"
    path.write_text(text)
    assert any(shown in what for what in findings(path))


def test_only_the_loader_of_stage_files_may_run_text():
    assert all((ROOT / name).is_file() for name in MAY_EXECUTE)


def test_the_page_on_security_is_linked():
    assert "docs/security.md" in (ROOT / "README.md").read_text(encoding="utf-8")
