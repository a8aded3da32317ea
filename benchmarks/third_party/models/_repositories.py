"""Find the checked-out repositories, and load the classes of a script without running it."""

import ast
import os
import sys
import types
from pathlib import Path


def repository(folder):
    """Add a folder of the repositories in AUTOPIPE_THIRD_PARTY to the import path."""
    path = str(Path(os.environ["AUTOPIPE_THIRD_PARTY"]) / folder)
    if path not in sys.path:
        sys.path.insert(0, path)


def definitions(script, name, **constants):
    """Return a module with the imports, classes and functions of a script, without its other statements.

    `constants` stand for the options that the script would have parsed.
    """
    if name in sys.modules:
        return sys.modules[name]
    path = Path(os.environ["AUTOPIPE_THIRD_PARTY"]) / script
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    body = []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            absent = ast.ExceptHandler(ast.Name("ImportError", ast.Load()), None, [ast.Pass()])
            body.append(ast.Try([node], [absent], [], []))
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            body.append(node)
    module = types.ModuleType(name)
    module.__file__ = str(path)
    module.__dict__.update(constants)
    sys.modules[name] = module
    tree.body = body
    exec(compile(ast.fix_missing_locations(tree), str(path), "exec"), module.__dict__)
    return module
