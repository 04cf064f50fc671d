"""Helpers for tests of examples/: their modules, and their clients, built where possible."""

import importlib
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = [
    *("cmake", "g++", "make", "pkg-config"),
    *("libgrpc++-dev", "libprotobuf-dev", "protobuf-compiler-grpc"),
]
BUILD_S = 240


def load(name: str) -> Any:
    """A module of examples/, which is no package."""
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


def run(command: list[str], timeout_s: float, **options) -> subprocess.CompletedProcess[str]:
    """Output and errors together; the exit code is the caller's to look at."""
    return subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
        **options,
    )


def read_commands(name: str, program: str) -> list[list[str]]:
    """Those of a client's README that call a program; all are meant for the root."""
    text = (ROOT / "examples" / name / "README.md").read_text()
    return [shlex.split(line) for line in text.splitlines() if line.startswith(f"    {program} ")]


def build_cpp_client() -> list[str]:
    """The command of the client in C++; skips the test where its tools cannot be had.

    What did not change since the last time is not built again.
    """
    readmes, folder = "build/cpp_client", str(ROOT / "build" / "test_cpp_client")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    if not _has_cpp_tools(path):
        pytest.skip(f"needs {', '.join(PACKAGES)}; make test-packages installs them")
    environment = {**os.environ, "PATH": path}
    fast = ["-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O0"]
    configure, build = read_commands("cpp_client", "cmake")
    for command in ([*configure, *fast], [*build, "--parallel", "2"]):
        command = [part.replace(readmes, folder) for part in command]
        result = run(command, BUILD_S, env=environment, cwd=ROOT)
        assert result.returncode == 0, result.stdout
    [[client, *_]] = read_commands("cpp_client", f"{readmes}/walk_client")
    return [client.replace(readmes, folder)]


def _has_cpp_tools(path: str) -> bool:
    programs = ("cmake", "c++", "pkg-config", "protoc", "grpc_cpp_plugin")
    if not all(shutil.which(program, path=path) for program in programs):
        return False
    return run(["pkg-config", "--exists", "grpc++", "protobuf"], 10).returncode == 0


def install_js_client(folder: Path) -> list[str]:
    """The command of the client in JavaScript; skips the test where it cannot be installed."""
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("needs node and npm")
    client, proto = folder / "examples" / "js_client", folder / "libtorchbeast" / "rpc"
    ignore = shutil.ignore_patterns("node_modules")
    shutil.copytree(ROOT / "examples" / "js_client", client, ignore=ignore)
    proto.mkdir(parents=True)
    shutil.copy(ROOT / "libtorchbeast" / "rpc" / "env.proto", proto)
    try:
        [install] = read_commands("js_client", "npm")
        result = run([*install, "--no-audit", "--no-fund", "--ignore-scripts"], 120, cwd=folder)
        failed = result.stdout if result.returncode != 0 else ""
    except subprocess.TimeoutExpired:
        failed = "npm ci took more than 120 s"
    if failed:
        ping = run(["timeout", "20", "npm", "ping"], 30, cwd=client)
        if ping.returncode != 0:
            pytest.skip(f"npm's registry cannot be reached: {failed[-500:]}")
        pytest.fail(failed)
    [[node, script, *_]] = read_commands("js_client", "node")
    return [node, str(folder / script)]
