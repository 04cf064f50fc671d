"""Whoever installs the package gets what it imports, and nothing else."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

from torchbeast.errors import UsageError
from torchbeast.report.plot import Options, draw

ROOT = Path(__file__).parent.parent
PACKAGES = ("torchbeast", "libtorchbeast", "nest")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
USED_EXTRAS = ("plot", "keys", "ray", "slurm")  # imported by programs that most do without

# What is imported by another name than it is installed by.
MODULES = {"opencv-python-headless": "cv2", "grpcio": "grpc", "protobuf": "google"}


def modules(requirements: list[str]) -> set[str]:
    names = [re.split(r"[^\w-]", requirement)[0] for requirement in requirements]
    return {MODULES.get(name, name).replace("-", "_") for name in names}


def imports() -> set[str]:
    found: set[str] = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    found |= {alias.name for alias in node.names}
                elif isinstance(node, ast.ImportFrom):
                    found.add(node.module or "")
    # PyTorch's writer of TensorBoard files imports TensorBoard.
    found = {name.replace("torch.utils.tensorboard", "tensorboard") for name in found}
    return {name.split(".")[0] for name in found} - sys.stdlib_module_names - set(PACKAGES)


def test_every_requirement_is_imported_and_every_import_is_required():
    extras = modules([r for name in USED_EXTRAS for r in PROJECT["optional-dependencies"][name]])
    required = modules(PROJECT["dependencies"])
    assert not extras & required
    assert imports() == required | extras


def test_without_matplotlib_a_sentence_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match="pip install matplotlib"):
        draw(Options(runs=(tmp_path,)))


def test_secrets_are_neither_committed_nor_copied_into_an_image():
    for name in (".gitignore", ".dockerignore"):
        ignored = (ROOT / name).read_text().splitlines()
        assert {"keys", "**/*.key", "**/*.pem", "**/token", "**/*.token"} <= set(ignored), name


def test_the_container_does_not_run_as_root():
    lines = [line.split() for line in (ROOT / "Dockerfile").read_text().splitlines() if line]
    names = [line[0] for line in lines]
    user = lines[len(names) - 1 - names[::-1].index("USER")][1]
    assert user.split(":")[0] not in ("root", "0")
    assert names.index("ENTRYPOINT") > names.index("USER")
