"""The arrows of docs/design.md: who may import whom inside striate."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import striate
from support.sandbox import run_python

PACKAGE = Path(striate.__file__).parent

# From the top down: a module imports only what stands in a later row. What a row's modules have in common is how much
# of the world they know.
ROWS = (
    {"__main__"},
    {"cli", "integrations", "dcp"},
    {"volume", "export", "compare"},
    {"torch_api"},
    {"stream", "repair", "importing"},
    {"transaction", "scrub"},
    {"leftovers", "opening"},
    {"member_writer", "member_set"},
    {"plain", "streaming"},
    {"generations", "member"},
    {"drive_set"},
    {"extents"},
    {"placement", "superblock"},
    {"manifest"},
    {"image", "merge", "groups", "engines", "output_file", "devices"},
    {"graph", "drives", "notices", "sizing"},
    {"errors", "progress"},
)
# These three import nothing of the rest, and nothing of the rest imports them, but for the command line.
APART = {"rescue", "liburing"}
# Those that decide what the objects and the bytes are know nothing of what moves them: no planning test needs a drive.
PURE = {"errors", "graph", "image", "manifest", "merge", "groups", "placement", "superblock", "extents"}


def module_of(path: Path) -> str:
    """The part of striate that a file belongs to: "volume", or "liburing" for a file of that package."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def own_imports(path: Path, tree: ast.Module) -> Iterator[tuple[ast.stmt, str]]:
    """Each import of a module of ours, as (statement, its first name below striate)."""
    depth = len(path.relative_to(PACKAGE).parts)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "striate":
                    yield node, [*alias.name.split("."), "__init__"][1]
        elif isinstance(node, ast.ImportFrom):
            base = (node.module or "").split(".") if node.module else []
            if node.level == 0 and base[:1] != ["striate"]:
                continue
            if node.level == 0:
                below = base[1:]
            else:
                inside = list(path.relative_to(PACKAGE).parts[: depth - node.level])
                below = [*inside, *base]
            for alias in node.names:
                yield node, (below or [alias.name])[0]


def files() -> list[Path]:
    found = sorted(PACKAGE.rglob("*.py"))
    assert len(found) > 10
    return found


def test_every_module_has_its_place_in_the_design() -> None:
    placed = set().union(*ROWS) | APART | {"__init__"}
    assert {module_of(path) for path in files()} <= placed


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    module = module_of(path)
    row = next((number for number, names in enumerate(ROWS) if module in names), None)
    tree = ast.parse(path.read_text())
    inside_functions = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for inner in ast.walk(node)
    }
    for node, target in own_imports(path, tree):
        where = f"{path.name}:{node.lineno} imports {target}"
        assert node not in inside_functions, f"{where} inside a function, which hides it"
        if module == "__init__":
            continue
        if target == module and path.parent != PACKAGE:
            continue  # within a package
        assert module not in APART, f"{where}: {module} stands apart"
        assert row is not None
        if target == "_engine":
            assert module not in PURE, f"{where}: {module} is pure"
            continue
        if (
            target in ("liburing", "__init__") and module == "cli"
        ):  # the command line uses the face, as people do
            continue
        assert any(target in names for names in ROWS[row + 1 :]), f"{where}, which is not below it"


def test_the_front_door_only_re_exports() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    defined = [node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    assert defined == ["__getattr__", "__dir__"]
    for name in striate.__all__:
        assert getattr(striate, name) is not None


@pytest.mark.parametrize("module", ["striate", "striate.errors", "striate.rescue"])
def test_what_must_work_without_torch_and_without_anything_compiled_imports_neither(module: str) -> None:
    done = run_python(
        """
        import importlib, sys

        class Refuse:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] == "torch" or name.startswith(("striate._engine", "striate.liburing")):
                    raise ImportError(f"{name} must not be needed")

        sys.meta_path.insert(0, Refuse())
        importlib.import_module(sys.argv[1])
        print("imported")
        """,
        module,
    )
    assert done.stdout == "imported\n"


def test_types_are_shipped() -> None:
    assert (PACKAGE / "py.typed").exists()
    for stub in ("_engine.pyi", "liburing/_liburing.pyi"):
        assert (PACKAGE / stub).stat().st_size > 0
