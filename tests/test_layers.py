"""Imports point downwards only, and MonoBeast needs nothing compiled."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import libtorchbeast._C
import nest._C

ROOT = Path(__file__).parent.parent

# The parts of libtorchbeast that are pure Python, and need only NumPy.
PURE = {
    f"libtorchbeast.{name}"
    for name in (
        "action_masks",
        "groups",
        "old_gym",
        "sync_envs",
        "episode_info",
        "observations",
        "helper_process",
        "shared_memory",
        "output_log",
        "grpc_forks",
        "log_repeats",
        "malloc",
        "supervisor",
        "rollout_layout",
        "rows",
        "secret",
        "seeding",
        "wait_notice",
        "specs",
        "text",
        "tree",
    )
}
COMPILED = ("nest._C", "libtorchbeast._C")

# Each package may import the ones named, and itself.
ALLOWED = {
    "nest": set(),
    "libtorchbeast": {"nest", "torch"},
    "torchbeast/errors.py": set(),
    "torchbeast/user_code.py": {"torchbeast.errors"},
    "torchbeast/envs": {"torchbeast.errors", "torchbeast.user_code", *PURE},
    "torchbeast/core": {"torchbeast.errors", "torchbeast.envs", "torch", *PURE},
    "torchbeast/models": {
        "torchbeast.errors",
        "torchbeast.user_code",
        "torchbeast.envs",
        "torchbeast.core",
        "torch",
        *PURE,
    },
    "torchbeast/runtime": {
        "torchbeast.errors",
        "torchbeast.user_code",
        "torchbeast.envs",
        "torchbeast.core",
        "torch",
        *PURE,
    },
    "torchbeast/report": {"torchbeast.errors", "torchbeast.core", "torchbeast.runtime", "torch"},
    "torchbeast/fleet": {
        "torchbeast.errors",
        "torchbeast.polybeast_env",
        "torchbeast.polybeast_actor",
        "libtorchbeast",
    },
    "torchbeast/run": {
        "torchbeast.errors",
        "torchbeast.user_code",
        "torchbeast.envs",
        "torchbeast.models",
        "torchbeast.core",
        "torchbeast.runtime",
        "torchbeast.report",
        "libtorchbeast",
        "torch",
    },
}


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            of_package = node.module == "torchbeast"
            yield from (
                f"torchbeast.{alias.name}" if of_package else node.module for alias in node.names
            )


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


@pytest.mark.parametrize("module", sorted(PURE))
def test_the_pure_modules_need_only_numpy(module):
    run_without(f"import {module}", *COMPILED, "torch", "gymnasium", "grpc", "google.protobuf")


def test_environments_need_neither_torch_nor_anything_compiled():
    """Processes that step environments start soon and stay small."""
    run_without("import torchbeast.envs", *COMPILED, "torch", "grpc", "google.protobuf")


def test_monobeast_needs_nothing_compiled():
    run_without("import torchbeast.monobeast", *COMPILED)


def test_learning_does_not_import_the_compiler():
    """Which takes as long as all of PyTorch."""
    program = (
        "import torch\n"
        "from torchbeast.core.optimizers import make_optimizer\n"
        "from torchbeast.core.settings import Settings\n"
        "import torch.optim.lr_scheduler\n"
        "for name in ('rmsprop', 'adam', 'adamw', 'sgd'):\n"
        "    model = torch.nn.Linear(1, 1)\n"
        "    optimizer = make_optimizer(model, Settings(optimizer=name))\n"
        "    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)\n"
        "    model(torch.ones(1, 1)).sum().backward()\n"
        "    optimizer.step()\n"
        "    scheduler.step()\n"
        "    optimizer.zero_grad()\n"
        "    optimizer.load_state_dict(optimizer.state_dict())\n"
    )
    run_without(program, "torch._dynamo")


def test_the_data_plane_imports_what_is_used_and_no_more():
    run_without("import libtorchbeast", *COMPILED, "torch", "grpc", "google.protobuf")
    run_without("import libtorchbeast; libtorchbeast.BatchingQueue()", "grpc", "google.protobuf")


def test_the_data_plane_names_what_it_exports():
    assert set(libtorchbeast.__all__) <= set(dir(libtorchbeast))
    for name in libtorchbeast.__all__:
        assert getattr(libtorchbeast, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Sever'"):
        libtorchbeast.Sever  # noqa: B018


def test_the_data_plane_imports_no_torch_before_it_is_asked_for_a_tensor():
    """Helper processes import it, and should not pay for what they do not use."""
    program = "import numpy, libtorchbeast; libtorchbeast.Array(numpy.zeros(3))\n"
    run_without(program + "assert 'torch' not in sys.modules")


def test_processes_for_remote_environments_import_no_torch():
    run_without("import libtorchbeast.rpc.gateway, libtorchbeast.env_host", "torch")


def test_fleets_import_neither_torch_nor_a_cluster_before_it_is_asked_for():
    run_without("import torchbeast.fleet.__main__, torchbeast.fleet.ray_actors, "
                "torchbeast.fleet.slurm_jobs", "torch", "ray", "submitit")  # fmt: skip


def test_the_learner_imports_no_grpc():
    """Its process forks and is forked, and has no use for grpc's threads."""
    run_without("import libtorchbeast.rpc.gateway_processes", "grpc")


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
