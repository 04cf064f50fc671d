"""Imports point downwards only, and MonoBeast's side needs nothing that was compiled."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent

# What each package may import of ours; what is above it, never.
MAY_IMPORT = {
    "nest": {"nest"},
    "libtorchbeast": {"libtorchbeast", "nest"},
    "torchbeast": {"torchbeast", "libtorchbeast", "nest"},
}


def imported_modules(path: pathlib.Path) -> set[str]:
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            modules.add(str(node.module))
    return {module.partition(".")[0] for module in modules}


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_point_downwards(package):
    files = [*ROOT.glob(f"{package}/**/*.py"), *ROOT.glob(f"{package}/**/*.pyi")]
    assert files
    for path in files:
        ours = imported_modules(path) & set(MAY_IMPORT)
        assert ours <= MAY_IMPORT[package], path


def run(program: str, without: str = "") -> None:
    """Run a program where importing some modules fails."""
    block = f"import sys\nfor name in {without.split()}: sys.modules[name] = None\n"
    result = subprocess.run(
        [sys.executable, "-c", block + program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr


def test_torchbeast_works_where_nothing_was_compiled():
    program = "import torchbeast\n"
    if (ROOT / "torchbeast" / "monobeast.py").exists():
        program += "import torchbeast.monobeast\n"
    run(program, without="nest nest._C libtorchbeast libtorchbeast._C")


def test_the_data_plane_imports_no_torch_before_it_is_asked_for_a_tensor():
    """Helper processes import it, and should not pay for what they do not use."""
    program = """
import numpy, libtorchbeast
libtorchbeast.Array(numpy.zeros(3))
assert "torch" not in sys.modules
"""
    run(program)


def test_the_compiled_modules_link_against_no_libtorch():
    import libtorchbeast._C
    import nest._C

    for module in (libtorchbeast._C, nest._C):
        libraries = subprocess.run(["ldd", module.__file__], capture_output=True, text=True).stdout
        assert "libc.so" in libraries
        assert "torch" not in libraries.replace(str(module.__file__), "")
