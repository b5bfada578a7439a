"""The structure that docs/architecture.md promises: rooms of a size that a newcomer can hold, and no deep chains."""

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
ROOMS = sorted(path.parent.name for path in (ROOT / "src" / "panscan").glob("*/__init__.py"))
PACKAGES = [
    ".".join(path.parent.relative_to(ROOT / "src").parts) for path in (ROOT / "src" / "panscan").rglob("*/__init__.py")
]
MOST_MODULES = 30
MOST_IMPORTS = 5  # one after the other, inside a package


@cache
def modules() -> dict[Path, ast.Module]:
    """Every module of the package, parsed."""
    return {path: ast.parse(path.read_text("utf-8")) for path in (ROOT / "src" / "panscan").rglob("*.py")}


@cache
def import_graph() -> Any:
    import grimp  # not at the top: GPU machines that run pytest -m gpu need not have it

    return grimp.build_graph("panscan", cache_dir=None)


@cache
def imports_inside(package: str) -> dict[str, set[str]]:
    """Each module of a package, with the modules beside it that it imports, at its top or inside a function."""
    graph = import_graph()
    inside = {module for module in graph.modules if module.rpartition(".")[0] == package}
    return {module: graph.find_modules_directly_imported_by(module) & inside for module in inside}


def test_every_room_is_known_to_the_architecture_and_to_the_layers() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    layers = (ROOT / "pyproject.toml").read_text("utf-8")
    for room in ROOMS:
        assert f"`{room}/`" in page, room
        assert f'"panscan.{room}"' in layers, room


def test_no_package_has_more_modules_than_a_newcomer_can_hold() -> None:
    sizes = {str(path.parent): len([*path.parent.glob("*.py")]) for path in (ROOT / "src").rglob("__init__.py")}
    assert {package: size for package, size in sizes.items() if size > MOST_MODULES} == {}


def test_no_chain_of_imports_inside_a_package_is_long() -> None:
    deep = {}
    for package in PACKAGES:
        chain = max(map(tuple, _chains(imports_inside(package))), key=len, default=())
        if len(chain) - 1 > MOST_IMPORTS:
            deep[package] = " > ".join(chain)
    assert deep == {}


def _chains(imports: dict[str, set[str]]) -> list[list[str]]:
    """The longest chain that begins at each module. A room without cycles has one."""
    longest: dict[str, list[str]] = {}
    under_way: set[str] = set()

    def chain(module: str) -> list[str]:
        assert module not in under_way, f"a cycle of imports through {module}"
        if module not in longest:
            under_way.add(module)
            longest[module] = [module, *max((chain(imported) for imported in imports[module]), key=len, default=[])]
            under_way.discard(module)
        return longest[module]

    return [chain(module) for module in imports]


def test_private_helpers_have_names_of_their_own() -> None:
    """A stack trace with the name of a helper should say which one: no private name stands in four modules."""
    places = defaultdict(set)
    for path, tree in modules().items():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name.startswith("_"):
                places[node.name].add(path.name)
    assert {name: paths for name, paths in places.items() if len(paths) > 3} == {}


def test_a_class_name_means_one_thing() -> None:
    """No public class of one module has the name of another's, in another room or the same."""
    places: dict[str, list[str]] = defaultdict(list)
    for path, tree in modules().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path.name)
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_only_model_formats_compares_names_of_weight_formats() -> None:
    """Everybody else asks the format's object. Types of keys and values, and of a GPU's products, share some names."""
    from panscan.core.weight_formats import FORMATS

    other_types = ("kv_cache_dtype", "flops_per_s", "given")
    compared = []
    for path, tree in modules().items():
        if path.parts[-3:-1] == ("model", "formats"):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Compare) and not any(name in ast.unparse(node) for name in other_types):
                sides = [node.left, *node.comparators]
                words = [word for side in sides for word in (side, *getattr(side, "elts", ()))]
                names = {word.value for word in words if isinstance(word, ast.Constant)}
                compared += [f"{path.name}:{node.lineno}"] if names & {*FORMATS} else []
    assert compared == []


def test_a_model_family_is_named_by_its_rooms_only() -> None:
    """A new family is a package of ``model`` and a line of its registry: other rooms ask that. Prose may name one."""
    named = []
    for path, tree in modules().items():
        if path.relative_to(ROOT / "src" / "panscan").parts[0] in ("model", "runners"):
            continue
        prose = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                prose.add(node.value)
            name = {ast.ImportFrom: "module", ast.Name: "id", ast.Attribute: "attr", ast.alias: "name", ast.arg: "arg"}
            text = node.value if isinstance(node, ast.Constant) and node not in prose else ""
            text = getattr(node, name.get(type(node), "name"), None) or text
            if isinstance(text, str) and re.search("gemma_?3", text, re.IGNORECASE):
                named.append(f"{path.name}:{node.lineno} {text}")
    assert named == []
