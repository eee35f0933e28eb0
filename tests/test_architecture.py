"""The house rules that a reader relies on: who may import what, and how fast the command line answers."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "eagle3"
MODULES = sorted(PACKAGE.rglob("*.py"))
ALLOWED = {
    "hydra": ("cli.py", "config.py"),
    "omegaconf": ("cli.py", "config.py"),
    "wandb": ("tracking.py",),
    "speculators": ("drafter/",),
    "vllm": ("serving/",),
}


def _imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_only_the_modules_meant_for_it_import_a_library(path: Path) -> None:
    name = path.relative_to(PACKAGE).as_posix()
    for library, places in ALLOWED.items():
        assert library not in _imported(path) or name.startswith(places), f"{name} imports {library}"


def test_the_command_line_imports_nothing_heavy_before_it_works() -> None:
    heavy = ("torch", "transformers", "wandb", "speculators")
    code = f"import sys, eagle3.cli, eagle3.config; eagle3.config.register(); print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_modules_stay_readable_in_one_sitting() -> None:
    assert not [path.name for path in MODULES if len(path.read_text().splitlines()) > 400]
