"""The map of the house, held: which room may import which, no circle, no private name of another module, nothing too long."""

import ast
import subprocess
from graphlib import TopologicalSorter
from itertools import chain
from pathlib import Path

import pytest

from tost_hf.model.configuration_tost import CODE_FILES


ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "tost_hf"
# Rooms and single modules from the ground up: each may import what stands on a lower floor, and its own room.
FLOORS = (
    ("model", "files", "version"),
    ("cache_files",),
    ("image_processing",),
    ("hub", "interpret", "parallel"),
    ("training", "convert", "serving", "exporting"),
    ("space",),
    ("__init__",),
    ("commands",),
    ("cli",),
)
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
LONGEST_FILE, LONGEST_FUNCTION = 500, 60
LONG_FILES = {"src/tost_hf/model/tssa_triton.py", "src/tost_hf/convert.py"}

MODULES = {".".join(path.relative_to(SOURCE).with_suffix("").parts): path for path in sorted(SOURCE.rglob("*.py"))}


def room(module: str) -> str:
    return module.partition(".")[0]


def imports(module: str) -> list[tuple[str, str]]:
    """What a module imports of the package, anywhere in its code: (module, name)."""
    path, found = MODULES[module], []
    folder = path.parent.relative_to(SOURCE).parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import) and any(alias.name.partition(".")[0] == "tost_hf" for alias in node.names):
            found += [("__init__", "") for _ in node.names]
        if not isinstance(node, ast.ImportFrom) or (node.level == 0 and (node.module or "").partition(".")[0] != "tost_hf"):
            continue
        if node.level:
            base = [*folder[: len(folder) - node.level + 1], *(node.module or "").split(".")]
        else:
            base = node.module.split(".")[1:]
        base = [part for part in base if part]
        for alias in node.names:
            for name in (".".join([*base, alias.name]), ".".join(base), ".".join([*base, "__init__"])):
                if name in MODULES:
                    found.append((name, alias.name))
                    break
            else:
                raise AssertionError(f"{module} imports {alias.name} from an unknown place")
    return found


GRAPH = {module: {target for target, _ in imports(module)} for module in MODULES}


def test_every_module_has_its_floor():
    assert {room(module) for module in MODULES} == set(FLOOR_OF)


@pytest.mark.parametrize("module", MODULES)
def test_imports_do_not_climb(module):
    climbing = [t for t in GRAPH[module] if room(t) != room(module) and FLOOR_OF[room(t)] >= FLOOR_OF[room(module)]]
    assert not climbing


def test_there_is_no_import_circle():
    TopologicalSorter(GRAPH).prepare()


def test_what_travels_is_the_room_model():
    travels = set(chain(*CODE_FILES.values()))
    assert travels == {path.name for path in (SOURCE / "model").glob("*.py")} - {"__init__.py"}


@pytest.mark.parametrize("module", MODULES)
def test_private_names_stay_at_home(module):
    assert [name for _, name in imports(module) if name.startswith("_") and not name.startswith("__")] == []


def test_nothing_is_too_long():
    tracked = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    files = [name for name in tracked if not name.startswith("tests/fixtures/")] or [
        str(path.relative_to(ROOT)) for path in MODULES.values()
    ]
    lines = {name: len((ROOT / name).read_text().splitlines()) for name in files if (ROOT / name).exists()}
    assert {name: count for name, count in lines.items() if count > LONGEST_FILE and name not in LONG_FILES} == {}
    functions = {
        f"{module}.{node.name}": node.end_lineno - node.lineno + 1
        for module, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: count for name, count in functions.items() if count > LONGEST_FUNCTION} == {}
