"""The structure of the source: import layers, torch-free packages, size budget, cheap import."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

import yunque

SOURCE = Path(yunque.__file__).parent
# A package imports only from packages of a lower level, never from its own level's others.
LEVELS = {
    "core": 0,
    **dict.fromkeys(["text", "ops"], 1),
    **dict.fromkeys(["protocol", "model"], 2),
    **dict.fromkeys(["data", "weights", "quant", "parallel"], 3),
    **dict.fromkeys(["train", "engine"], 4),
    **dict.fromkeys(["serve", "agents"], 5),
    **dict.fromkeys(["rl", "evals"], 6),
    **dict.fromkeys(["hardware", "launch"], 7),
    **dict.fromkeys(["recipes", "cli"], 8),
    "__main__": 9,
}
TORCH_FREE = [name for name in ("core", "text", "protocol", "agents", "evals") if (SOURCE / name).is_dir()]
ORACLES = {"transformers", "jinja2", "jsonschema", "pytest", "hypothesis"}
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_PARAMETERS = 400, 60, 7
IMPORT_LIMIT_S = 0.5


def layer_violations(module: str, source: str) -> list[str]:
    """Imports in ``source`` that the layers forbid to ``module`` (a dotted name; packages: ``.__init__``)."""
    importer = module.split(".")[1]
    found = []
    for name, line in imported_names(module, source):
        root, _, rest = name.partition(".")
        if root in ORACLES:
            found.append(f"{module}:{line}: {root} is for tests only")
        if root != "yunque" or not rest:
            continue
        package = rest.split(".")[0]
        if package in ("__version__", "__init__", importer):
            continue
        if package not in LEVELS:
            found.append(f"{module}:{line}: package {package!r} has no level")
        elif importer == "__init__" or LEVELS.get(importer, -1) <= LEVELS[package]:
            found.append(f"{module}:{line}: {importer} may not import {package}")
    if importer != "__init__" and importer not in LEVELS:
        found.append(f"{module}: package {importer!r} has no level")
    return found


def imported_names(module: str, source: str) -> Iterator[tuple[str, int]]:
    """Every name an import statement or ``import_module("...")`` call reaches, at any depth, as absolute."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(module.split(".")[: -node.level]) if node.level else ""
            origin = ".".join(part for part in (base, node.module) if part)
            yield from ((f"{origin}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield first.value, node.lineno


def size_violations(module: str, source: str) -> list[str]:
    """What in ``source`` is over the size budget, and a missing module docstring."""
    found = []
    tree = ast.parse(source)
    if not (ast.get_docstring(tree) or "").strip():
        found.append(f"{module}: no module docstring")
    if (lines := len(source.splitlines())) > MAX_FILE_LINES:
        found.append(f"{module}: {lines} lines, more than {MAX_FILE_LINES}")
    if module.startswith("yunque.ops.triton"):  # kernels may be wide
        return found
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        where = f"{module}:{node.lineno}: {node.name}"
        if (lines := (node.end_lineno or 0) - node.lineno + 1) > MAX_FUNCTION_LINES:
            found.append(f"{where} has {lines} lines, more than {MAX_FUNCTION_LINES}")
        arguments = node.args
        named = [
            *arguments.posonlyargs,
            *arguments.args,
            *arguments.kwonlyargs,
            arguments.vararg,
            arguments.kwarg,
        ]
        names = [argument.arg for argument in named if argument and argument.arg not in ("self", "cls")]
        if len(names) > MAX_PARAMETERS:
            found.append(f"{where} has {len(names)} parameters, more than {MAX_PARAMETERS}")
    return found


def modules() -> list[tuple[str, str]]:
    """Dotted name and source of every module of the package."""
    return [
        (".".join(path.relative_to(SOURCE.parent).with_suffix("").parts), path.read_text(encoding="utf-8"))
        for path in sorted(SOURCE.rglob("*.py"))
    ]


def test_packages_import_only_from_lower_levels():
    assert [line for module, source in modules() for line in layer_violations(module, source)] == []


def test_files_functions_and_parameters_stay_in_budget():
    assert [line for module, source in modules() for line in size_violations(module, source)] == []


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("yunque.text.a", "import yunque.core.errors", 0),
        ("yunque.text.a", "from yunque.text.b import c", 0),
        ("yunque.text.a", "from yunque import __version__", 0),
        ("yunque.text.a", "import torch, json", 0),
        ("yunque.text.a", "import yunque.model", 1),
        ("yunque.text.a", "from yunque.ops import topk", 1),
        ("yunque.text.a", "from yunque import core, model", 1),
        ("yunque.text.a", "def f():\n    from yunque.model import config", 1),
        ("yunque.text.a", "if TYPE_CHECKING:\n    import yunque.ops.device", 1),
        ("yunque.text.a", "from ..model import config", 1),
        ("yunque.text.__init__", "from ..model import config", 1),
        ("yunque.text.a", "from .b import c", 0),
        ("yunque.text.a", "importlib.import_module('yunque.model')", 1),
        ("yunque.text.a", "import yunque.helpers", 1),
        ("yunque.helpers.a", "import json", 1),
        ("yunque.core.a", "import yunque.text.b", 1),
        ("yunque.cli.a", "import yunque.train.loop, yunque.core.seeds", 0),
        ("yunque.__init__", "from yunque.core import errors", 1),
        ("yunque.text.a", "def f():\n    import jinja2", 1),
    ],
)
def test_layer_checker_sees_every_form_of_import(module, source, expected):
    assert len(layer_violations(module, source)) == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ('"""D."""\n', []),
        ("x = 1\n", ["no module docstring"]),
        ('"""D."""\n' + "\n" * 399, []),
        ('"""D."""\n' + "\n" * 400, ["401 lines"]),
        ('"""D."""\ndef f():\n' + "    x = 1\n" * 59, []),
        ('"""D."""\ndef f():\n' + "    x = 1\n" * 60, ["f has 61 lines"]),
        ('"""D."""\nclass C:\n    async def f(self):\n' + "        x = 1\n" * 60, ["f has 61 lines"]),
        ('"""D."""\ndef f(a, b, c, d, /, e, *, g, h): ...\n', []),
        ('"""D."""\ndef f(a, b, c, d, /, e, *, g, h, **k): ...\n', ["f has 8 parameters"]),
        ('"""D."""\nclass C:\n    def f(self, a, b, c, d, e, g, h): ...\n', []),
    ],
)
def test_size_checker_counts_exactly(body, expected):
    found = size_violations("yunque.core.a", body)
    assert len(found) == len(expected)
    assert all(part in line for part, line in zip(expected, found, strict=True))


BLOCK_TORCH = """
    import importlib, pkgutil, sys

    class Blocked:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] == "torch":
                raise ImportError(f"{name} was imported")

    sys.meta_path.insert(0, Blocked())
    count = 0
    for root in sys.argv[1:]:
        package = importlib.import_module(root)
        for module in pkgutil.walk_packages(getattr(package, "__path__", []), root + "."):
            importlib.import_module(module.name)
            count += 1
    print(count)
"""


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-c",
        f"import sys; sys.path.insert(0, {str(SOURCE.parent)!r})\n{dedent(code)}",
    ]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)


def test_torch_free_packages_import_with_torch_blocked():
    result = run_python(BLOCK_TORCH, *[f"yunque.{name}" for name in TORCH_FREE])
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) >= 7


def test_torch_block_is_seen_by_what_imports_torch():
    result = run_python(BLOCK_TORCH, "safetensors.torch")
    assert result.returncode == 1
    assert "ImportError: torch was imported" in result.stderr


def test_import_yunque_is_quick_and_pulls_no_torch():
    code = """
        import time
        start = time.perf_counter()
        import yunque
        print(time.perf_counter() - start, any(m in sys.modules for m in ("torch", "numpy", "pydantic")))
    """
    outputs = [run_python(code).stdout.split() for _ in range(3)]
    assert min(float(seconds) for seconds, _ in outputs) < IMPORT_LIMIT_S
    assert {heavy for _, heavy in outputs} == {"False"}
