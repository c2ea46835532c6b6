"""Imports between files, even those inside functions, form no cycles and only go downward."""
import ast
import graphlib

from conftest import ROOT

PATHS = [*ROOT.glob("*.py"), *ROOT.glob("common/**/*.py")]
# {"common.data.files": its path}; the name of a package is that of its folder.
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PATHS
}
SCRIPTS = {path.stem for path in ROOT.glob("*.py")}


def imports(tree):
    """The names of the project's files that a syntax tree imports."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert not node.level, "use an absolute import, so that this test finds it"
            within = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= (within & FILES.keys()) or {node.module}
    return names & FILES.keys()


TREES = {name: ast.parse(path.read_text()) for name, path in FILES.items()}
ARROWS = {name: imports(tree) for name, tree in TREES.items()}


def arrows(source, *targets):
    """["importer -> imported"], where the names start with `source` and any of `targets`."""
    return [
        f"{name} -> {other}"
        for name, others in ARROWS.items()
        for other in sorted(others)
        if name.startswith(source) and other.startswith(targets)
    ]


def test_no_file_is_in_a_circle_with_another():
    graphlib.TopologicalSorter(ARROWS).prepare()  # a CycleError names the files
    assert "common.config" in ARROWS["common.dist"]


def test_no_arrow_goes_up():
    up = arrows("common.data", *SCRIPTS, "common.interop")
    up += arrows("common.models", *SCRIPTS, "common.interop", "common.data")
    assert not up
    importers = {arrow.partition(" ")[0] for arrow in arrows("common", *SCRIPTS)}
    assert importers <= {"common.interop.pretrained"}


def test_the_core_imports_interop_only_within_functions():
    core = [name for name in FILES if name.count(".") == 1 and FILES[name].stem != "__init__"]
    assert "common.resume" in core
    for name in core:
        tree = ast.parse(FILES[name].read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                node.body = [ast.Pass()]
        early = imports(tree)
        assert not [other for other in early if other.startswith("common.interop")], name
