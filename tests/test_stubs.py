"""The type stubs name what the compiled modules have, and everything there explains itself."""

import ast
import importlib
import inspect
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent
MODULES = ["nest", "libtorchbeast"]


def stub_names(body: list[ast.stmt]) -> dict[str, list[ast.stmt]]:
    """Public names of a stub, with the body of those that are classes."""
    names: dict[str, list[ast.stmt]] = {}
    for node in body:
        if isinstance(node, ast.ClassDef):
            names[node.name] = node.body
        elif isinstance(node, ast.FunctionDef):
            names[node.name] = []
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname: [] for alias in node.names if alias.asname}
    return names


def public(names) -> set[str]:
    return {name for name in names if not name.startswith("_")}


@pytest.mark.parametrize("package", MODULES)
def test_stubs_name_what_is_there(package):
    module = importlib.import_module(f"{package}._C")
    stub = stub_names(ast.parse((ROOT / package / "_C.pyi").read_text()).body)
    assert public(stub) == public(vars(module))
    for name, body in stub.items():
        members = public(stub_names(body))
        assert members == public(vars(getattr(module, name))) if body else not members


@pytest.mark.parametrize("package", MODULES)
def test_everything_is_exported_and_documented(package):
    module = importlib.import_module(package)
    compiled = importlib.import_module(f"{package}._C")
    internal = {"Turn"} if package == "libtorchbeast" else set()
    assert set(module.__all__) >= public(vars(compiled)) - internal
    assert module.__all__ == sorted(module.__all__)
    for name in module.__all__:
        item = getattr(module, name)
        if not (inspect.isclass(item) and issubclass(item, Exception)):
            assert inspect.getdoc(item), name
