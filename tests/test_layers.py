"""Imports point downwards only, and MonoBeast needs nothing compiled."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent

# Each package may import the ones named, and itself.
ALLOWED = {
    "torchbeast/errors.py": set(),
    "torchbeast/envs": {"torchbeast.errors"},
    "torchbeast/models": {"torchbeast.errors", "torch"},
    "torchbeast/core": {"torchbeast.errors", "torchbeast.envs", "torchbeast.models", "torch"},
    "torchbeast/report": {"torchbeast.core", "torch"},
}


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module


def test_imports_point_downwards():
    watched = ("torchbeast", "torch", "libtorchbeast", "nest")
    for place, allowed in ALLOWED.items():
        path = ROOT / place
        own = place.removesuffix(".py").replace("/", ".")
        for file in [path] if path.is_file() else path.rglob("*.py"):
            for name in imported(file):
                if name.split(".")[0] in watched:
                    ok = any(name == a or name.startswith(a + ".") for a in {own, *allowed})
                    assert ok, f"{file.relative_to(ROOT)} imports {name}"


def test_monobeast_needs_nothing_compiled():
    program = (
        "import sys\n"
        "for name in ('nest', 'libtorchbeast', 'nest._C', 'libtorchbeast._C'):\n"
        "    sys.modules[name] = None  # importing it raises\n"
        "import torchbeast.monobeast\n"
    )
    subprocess.run([sys.executable, "-c", program], timeout=60, check=True)


def test_monobeast_fits_on_the_page():
    lines = (ROOT / "torchbeast" / "monobeast.py").read_text().splitlines()
    assert len(lines) < 500
