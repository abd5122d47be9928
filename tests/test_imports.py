"""One-way imports: who may import whom, and which libraries never load on the formula path."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SIBLINGS = ("probes", "search", "reports")
HEAVY = ("torch", "transformers", "peft", "bitsandbytes", "accelerate", "trl", "datasets")


def imported_packages(path: Path) -> set[str]:
    """Top-level packages named by any import statement of the file, late imports included."""
    packages = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            packages.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            packages.add(node.module.split(".")[0])
    return packages


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("path", modules("planner"), ids=lambda path: str(path.relative_to(ROOT)))
def test_planner_imports_no_sibling_and_nothing_heavy(path: Path) -> None:
    composition_root = ROOT / "planner" / "cli"
    packages = imported_packages(path)
    if composition_root not in path.parents and path.name != "cli.py":
        assert not packages & set(SIBLINGS)
    assert not packages & {*HEAVY, "optuna"}


@pytest.mark.parametrize("package", SIBLINGS)
def test_siblings_never_import_each_other(package: str) -> None:
    others = set(SIBLINGS) - {package}
    for path in modules(package):
        assert not imported_packages(path) & others, path


@pytest.mark.parametrize("package", ["search", "reports"])
def test_only_probes_imports_torch(package: str) -> None:
    for path in modules(package):
        assert not imported_packages(path) & set(HEAVY), path
