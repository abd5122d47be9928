"""One-way imports: who may import whom, which libraries never load on the formula path, what is declared; sizes."""

import ast
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
SIBLINGS = ("probes", "search", "reports")
PACKAGES = ("planner", *SIBLINGS)
NAMELESS = {"one", "found", "known", "own", "said", "asked", "told", "beside"}
"""Names that say nothing of what they hold: a local is called what it is (`allocation`, `setup`)."""
HEAVY = ("torch", "transformers", "peft", "bitsandbytes", "accelerate", "trl", "datasets")


class Facts(NamedTuple):
    """What the tests below ask of a file, of one look at it.

    Attributes:
        imports: (module, names taken from it; none: itself) of every import statement, late ones included.
        typing_only: those that only a type checker reads.
        asked_for: what `importorskip` and `import_module` name.
        functions: (name, first line, number of lines but the first).
        nameless: lines of names that say nothing of what they hold.
    """

    num_lines: int
    imports: frozenset[tuple[str, tuple[str, ...]]]
    typing_only: frozenset[tuple[str, tuple[str, ...]]]
    asked_for: frozenset[str]
    functions: tuple[tuple[str, int, int], ...]
    nameless: tuple[tuple[int, str], ...]


@cache
def facts(path: Path) -> Facts:
    text = path.read_text()
    imports: dict[bool, set[tuple[str, tuple[str, ...]]]] = {False: set(), True: set()}
    asked_for, functions, nameless = set(), [], []

    def look(nodes: list[ast.AST], typing: bool) -> None:
        for node in nodes:
            if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
                look([*node.body], True)
                look([*node.orelse], typing)
                continue
            stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            name = node.id if stored else node.arg if isinstance(node, ast.arg) else None
            name = node.name if isinstance(node, ast.FunctionDef | ast.ClassDef) else name
            if name is not None and name.strip("_") in NAMELESS:
                nameless.append((node.lineno, name))
            if isinstance(node, ast.Import):
                imports[typing].update((alias.name, ()) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                imports[typing].add((node.module, tuple(alias.name for alias in node.names)))
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions.append((node.name, node.lineno, (node.end_lineno or 0) - node.lineno))
            elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if name in ("importorskip", "import_module"):
                    asked_for.add(str(node.args[0].value))
            look([*ast.iter_child_nodes(node)], typing)

    look([ast.parse(text)], False)
    return Facts(
        text.count("\n"), frozenset(imports[False]), frozenset(imports[True]), frozenset(asked_for), tuple(functions),
        tuple(nameless),
    )  # fmt: skip


def imported_packages(path: Path) -> set[str]:
    """Top-level packages named by any import statement of the file."""
    summary = facts(path)
    return {module.split(".")[0] for module, _ in summary.imports | summary.typing_only}


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def test_planner_imports_no_sibling_and_nothing_heavy() -> None:
    for path in modules("planner"):
        assert not imported_packages(path) & {*SIBLINGS, "finetune_planner", *HEAVY, "optuna"}, path


FLOORS = (
    ("core",), ("options",), ("setup",), ("models", "hardware", "samples"), ("memory",), ("speed", "frameworks"),
    ("planning",),
)  # fmt: skip
"""The rooms of `planner` from the ground up: each knows only what lies below it."""


def test_no_arrow_of_planner_runs_up() -> None:
    floor = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
    module_names = {module_name(path) for path in modules("planner")}
    assert {name.split(".")[1] for name in module_names if "." in name} <= {*floor}
    for path in modules("planner"):
        room = module_name(path).partition(".")[2].partition(".")[0]
        for module in imported_modules(path, module_names) if room else ():
            other = module.partition(".")[2].partition(".")[0]
            assert not other or other == room or floor[other] < floor[room], f"{path}: {module}"


def test_use_cases_know_no_flags() -> None:
    for path in (ROOT / "finetune_planner" / "app").glob("*.py"):
        assert "finetune_planner.cli" not in path.read_text().replace("`finetune_planner/cli`", ""), path


def test_nothing_imports_the_python_interface() -> None:
    for package in PACKAGES:
        for path in modules(package):
            assert "finetune_planner" not in imported_packages(path), path


@pytest.mark.parametrize("package", SIBLINGS)
def test_siblings_never_import_each_other(package: str) -> None:
    others = set(SIBLINGS) - {package}
    for path in modules(package):
        assert not imported_packages(path) & others, path


@pytest.mark.parametrize("package", ["search", "reports"])
def test_only_probes_imports_torch(package: str) -> None:
    for path in modules(package):
        assert not imported_packages(path) & set(HEAVY), path


OWN = ("planner", *SIBLINGS, "finetune_planner", "tests", "tools", "benchmarks")
OPTIONAL = {"amdsmi", "deepspeed", "fla", "flash_attn", "liger_kernel", "pandas", "timm", "triton"}
"""Used where a user's machine has them, and planned for or said to be missing where it has not."""
OPTIONAL |= {"canifinetune", "fitcheck", "fitscout"}  # asked in a Python of their own: `benchmarks/rival_child.py`
NAMED_OTHERWISE = {"sky": ["skypilot"], "kubeflow_trainer_api": ["kubeflow-trainer-api"], "sklearn": ["scikit-learn"]}
"""What is not installed for the tests cannot be asked for its distribution."""


def foreign_packages(path: Path) -> Iterator[str]:
    """Packages of other projects that a file imports, `importorskip` and `import_module` of a name included."""
    excluded = {*OWN, *sys.stdlib_module_names, *(file.stem for file in path.parent.glob("*.py"))}
    excluded |= {
        file.stem for file in (ROOT / "tests" / "planner").glob("*.py")
    }  # the validators read the sweep from there
    named = imported_packages(path) | {module.split(".")[0] for module in facts(path).asked_for}
    yield from named - excluded - OPTIONAL


def normal(requirement: str) -> str:
    """The distribution that a requirement names, as package indexes compare names."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None, requirement
    return re.sub(r"[-_.]+", "-", match.group()).lower()


def declared(*extras: str) -> set[str]:
    """Distributions that `pip install .[extras]` names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras)]
    return {normal(requirement) for requirements in groups for requirement in requirements}


distributions = cache(packages_distributions)


@pytest.mark.parametrize("room", OWN)
def test_every_import_is_declared(room: str) -> None:
    """What happens to be on a machine, or is there because another library needs it, is not relied on.

    The packages and tests may use what test.sh installs; benchmarks an extra more; the validators of other tools what
    the script beside them installs in a venv of its own.
    """
    installed = re.search(r"setup\.sh (\S+)", (ROOT / "test.sh").read_text())
    available = declared(*installed[1].split(","), *(["bench"] if room == "benchmarks" else []))
    providers = {**NAMED_OTHERWISE, **distributions()}
    undeclared: dict[str, set[str]] = defaultdict(set)
    for path in modules(room):
        scripts = "".join(script.read_text() for script in path.parent.glob("*.sh"))
        for package in foreign_packages(path):
            names = {normal(name) for name in providers.get(package, [package])}
            if not names & available and not any(f"{name}==" in scripts for name in {package, *names}):
                undeclared[package].add(str(path.relative_to(ROOT)))
    assert not undeclared


def test_every_declared_distribution_has_a_tested_version() -> None:
    pinned = {normal(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert not declared(*extras) - pinned


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(path: Path, module_names: set[str]) -> set[str]:
    """Modules of ours that the file imports, at its top or late. A name taken from a package is that package's own
    unless it is a module; what only a type checker reads is no import."""
    imported = set()
    for module, taken in facts(path).imports:
        names = {f"{module}.{name}" for name in taken}
        imported |= (names & module_names) | ({module} if names - module_names or not names else set())
    return imported & module_names


def circles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """The sets of modules that reach one another (Tarjan's strongly connected components of more than one)."""
    components: set[frozenset[str]] = set()
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    open_: list[str] = []

    def visit(node: str) -> None:
        order[node] = low[node] = len(order)
        open_.append(node)
        for other in sorted(graph[node]):
            if other not in order:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in open_:
                low[node] = min(low[node], order[other])
        if low[node] == order[node]:
            at = open_.index(node)
            members = frozenset(open_[at:])
            del open_[at:]
            if len(members) > 1:
                components.add(members)

    for node in sorted(graph):
        if node not in order:
            visit(node)
    return components


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a", "e"}, "e": set()}
    assert circles(graph) == {frozenset("abc")}


def test_no_file_imports_itself_round_a_circle() -> None:
    """Late imports count: a circle that only a function closes is one all the same."""
    paths = [path for package in PACKAGES for path in modules(package)]
    module_names = {module_name(path) for path in paths}
    graph = {module_name(path): imported_modules(path, module_names) - {module_name(path)} for path in paths}
    assert not circles(graph)


@pytest.mark.parametrize("package", ["finetune_planner", *PACKAGES])
def test_a_function_fits_a_screen_and_a_module_has_one_subject(package: str) -> None:
    """At most 80 lines a function, docstring and inner functions within, and 800 a module (docs/architecture.md)."""
    for path in modules(package):
        summary = facts(path)
        assert summary.num_lines <= 800, path
        for name, line, num in summary.functions:
            assert num < 80, f"{path}:{line} {name}"


RETIRED = {
    "Wish": "PlanRequest", "Tower": "Encoder", "with_eyes": "with_vision", "hears": "has_audio", "Flow": "DtypePolicy",
    "flow_of": "dtype_policy_of", "trusted_with": "replace_trusted", "with_": "replace", "Cut": "PrunedBranch",
    "surely_fits": "fits_with_margin", "Knobs": "ArchitectureOptions", "Crew": "ProcessGroup", "crew": "process_group",
    "Seat": "RankInfo", "seat": "rank_info", "take_turn": "lease_device", "Surroundings": "FileContext",
    "Liveness": "Heartbeat", "Pulse": "HeartbeatTiming", "Belief": "Posterior", "Elsewhere": "Observation",
    "Blame": "FailureAttribution", "Incident": "FailedTrial", "Groundwork": "SharedLayerCosts",
    "NodeFacts": "NodeResults", "spread_key": "layout_key", "all_spreads": "all_layouts", "simplicity": "tie_break",
    "asks_beside": "asks_reference", "transient": "temporary",
    "Held": "Allocation", "Known": "Constant", "Turn": "LoopContext", "Said": "LauncherArguments",
    "Asked": "StructureCase", "Gathering": "JobGpus", "Desk": "CommandRunner", "Shelf": "Catalog",
    "said_by_tool": "parse_tool_launcher", "held_alike": "equivalent_loss", "weights_held": "weight_allocation",
    "norm_behind": "post_mlp_norm", "loss_beside": "last_stage_loss", "asked_setup": "setup_from_request",
    "on_one_rung": "on_one_level", "rung": "level", "climb_probe": "refine_by_probe",
    "rival": "dominating", "Remedy": "Suggestion", "_outrun": "_dominated", "DEALT_BAND": "EXPERT_PARALLEL_BAND",
    "until_loss": "freed_before_loss_backward", "groundwork": "shared_costs",
}  # fmt: skip
"""Words of our own -> the field's, which took their place."""


def test_no_word_of_our_own_is_back() -> None:
    word = re.compile(rf"\b(?:{'|'.join(RETIRED)})\b(?!=True\))")  # rich has an argument `transient`
    for package in (*PACKAGES, "finetune_planner"):
        for path in modules(package):
            match = word.search(re.sub(r'"{3}[^"]*(?:"{1,2}[^"]+)*"{3}|"[^"\n]*"|#.*', "", path.read_text()))
            assert match is None, f"{path}: {match and match[0]} is {RETIRED[match[0]] if match else ''}"


@pytest.mark.parametrize("package", ["finetune_planner", *PACKAGES])
def test_a_name_says_what_it_holds(package: str) -> None:
    assert {path: facts(path).nameless for path in modules(package) if facts(path).nameless} == {}
