"""Imports point downwards only, and MonoBeast needs nothing compiled."""

import ast
import subprocess
import sys
from pathlib import Path

import libtorchbeast._C
import nest._C

ROOT = Path(__file__).parent.parent

# Each package may import the ones named, and itself.
ALLOWED = {
    "nest": set(),
    "libtorchbeast": {"nest", "torch"},
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
        files = [path] if path.is_file() else [*path.rglob("*.py"), *path.rglob("*.pyi")]
        assert files
        for file in files:
            for name in imported(file):
                if name.split(".")[0] in watched:
                    ok = any(name == a or name.startswith(a + ".") for a in {own, *allowed})
                    assert ok, f"{file.relative_to(ROOT)} imports {name}"


def run_without(program, *modules):
    """Run a program where importing some modules fails."""
    block = f"import sys\nfor name in {modules}: sys.modules[name] = None\n"
    subprocess.run([sys.executable, "-c", block + program], cwd=ROOT, timeout=60, check=True)


def test_monobeast_needs_nothing_compiled():
    compiled = ("nest", "nest._C", "libtorchbeast", "libtorchbeast._C")
    run_without("import torchbeast.monobeast", *compiled)


def test_the_data_plane_imports_no_torch_before_it_is_asked_for_a_tensor():
    """Helper processes import it, and should not pay for what they do not use."""
    program = "import numpy, libtorchbeast; libtorchbeast.Array(numpy.zeros(3))\n"
    run_without(program + "assert 'torch' not in sys.modules")


def test_processes_for_remote_environments_import_no_torch():
    run_without("import libtorchbeast.rpc.gateway, libtorchbeast.rpc.environments", "torch")


def test_the_learner_imports_no_grpc():
    """Its process forks and is forked, and has no use for grpc's threads."""
    run_without("import libtorchbeast.rpc.gateways", "grpc")


def test_the_compiled_modules_link_against_no_libtorch():
    for module in (libtorchbeast._C, nest._C):
        libraries = subprocess.run(
            ["ldd", module.__file__], capture_output=True, text=True, check=True
        ).stdout
        assert "libc.so" in libraries
        assert "torch" not in libraries.replace(str(module.__file__), "")


def test_monobeast_fits_on_the_page():
    lines = (ROOT / "torchbeast" / "monobeast.py").read_text().splitlines()
    assert len(lines) < 500
