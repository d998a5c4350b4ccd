"""The package layout: imports from lower layers only, no import cycles, no imports of private names."""

import ast
from graphlib import TopologicalSorter
from itertools import chain
from pathlib import Path

from tost_hf.model.base_tost import AUTO_MAPS, code_files


SOURCE = Path(__file__).parents[1] / "src" / "tost_hf"
# Packages and single modules, lowest layer first; each may import only from lower layers and from itself.
LAYERS = (
    ("model", "extras", "files", "transformers_patches", "version"),
    ("cache_files",),
    ("image_processing",),
    ("hub", "parallel"),
    ("training", "convert", "export", "interpret", "vllm"),
    ("app",),
    ("__init__",),
    ("cli",),
)
LAYER_OF = {package: number for number, packages in enumerate(LAYERS) for package in packages}
MODULES = {".".join(path.relative_to(SOURCE).with_suffix("").parts): path for path in sorted(SOURCE.rglob("*.py"))}


def package_of(module: str) -> str:
    return module.partition(".")[0]


def find_imports(module: str) -> list[tuple[str, str]]:
    """The imports from the package anywhere in a module, as pairs (module, name)."""
    path, imports = MODULES[module], []
    folder = path.parent.relative_to(SOURCE).parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import) and any(alias.name.partition(".")[0] == "tost_hf" for alias in node.names):
            imports += [("__init__", "") for _ in node.names]
        if not isinstance(node, ast.ImportFrom) or (node.level == 0 and (node.module or "").partition(".")[0] != "tost_hf"):
            continue
        if node.level:
            base = [*folder[: len(folder) - node.level + 1], *(node.module or "").split(".")]
        else:
            base = node.module.split(".")[1:]
        base = [component for component in base if component]
        for alias in node.names:
            for name in (".".join([*base, alias.name]), ".".join(base), ".".join([*base, "__init__"])):
                if name in MODULES:
                    imports.append((name, alias.name))
                    break
            else:
                raise AssertionError(f"{module} imports {alias.name} from an unknown module")
    return imports


IMPORTS = {module: find_imports(module) for module in MODULES}
GRAPH = {module: {target for target, _ in imports} for module, imports in IMPORTS.items()}


def test_every_package_has_a_layer():
    assert {package_of(module) for module in MODULES} == set(LAYER_OF)


def test_contributing_names_every_module():
    page = (SOURCE.parents[1] / ".github" / "CONTRIBUTING.md").read_text()
    diagram = page.partition("```text\n")[2].partition("```")[0].replace("└─", "").splitlines()
    assert [set(line.split()) for line in diagram] == [set(layer) for layer in reversed(LAYERS)]
    assert [path.name for path in MODULES.values() if path.name != "__init__.py" and path.name not in page] == []


def test_imports_point_to_lower_layers():
    upwards = [
        (module, target)
        for module, targets in GRAPH.items()
        for target in targets
        if package_of(target) != package_of(module) and LAYER_OF[package_of(target)] >= LAYER_OF[package_of(module)]
    ]
    assert upwards == []


def test_no_import_cycle():
    TopologicalSorter(GRAPH).prepare()


def test_no_private_name_is_imported():
    private = [
        (module, name)
        for module, imports in IMPORTS.items()
        for _, name in imports
        if name.startswith("_") and not name.startswith("__")
    ]
    assert private == []


def test_remote_code_is_the_package_model():
    files = set(chain(*map(code_files, AUTO_MAPS)))
    assert files == {path.name for path in (SOURCE / "model").glob("*.py")} - {"__init__.py"}


def test_remote_code_is_few_files():
    assert {model_type: len(code_files(model_type)) for model_type in AUTO_MAPS} == {"tost": 10, "tost_vision": 8}
