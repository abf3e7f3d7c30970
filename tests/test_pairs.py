"""A name that a step and a build.py of one chapter both define is the same code: nothing is explained that isn't used.

Pairs are found, not listed. Docstrings and comments may differ, and main() does.
"""

import ast

import pytest

from shared import chapters

FOLDERS = sorted(folder for folder in chapters.PROJECTS.glob("[0-9][0-9]_*") if (folder / "build.py").exists())


def definitions(path) -> dict[str, ast.AST]:
    """The functions, classes and constants that a file defines at its top level, docstrings taken out.

    `Block = step_05.Block` defines nothing: it takes what another step defines.
    """
    found = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[node.name] = without_docstrings(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name) and getattr(node.value, "attr", None) != target.id:
                    found[target.id] = node
    found.pop("main", None)
    return found


def without_docstrings(tree: ast.AST) -> ast.AST:
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            and ast.get_docstring(node) is not None
        ):
            node.body = node.body[1:] or [ast.Pass()]
    return tree


def same(a: ast.AST, b: ast.AST) -> bool:
    return ast.dump(a) == ast.dump(b)


def pairs():
    """(id, name, step's definition, build's definition) of every name that both define."""
    for folder in FOLDERS:
        built = definitions(folder / "build.py")
        for step in sorted(folder.glob("step_*.py")):
            mine = definitions(step)
            for name in sorted(mine.keys() & built.keys()):
                yield pytest.param(mine[name], built[name], id=f"{folder.name[:2]}-{step.name[5:7]}-{name}")


@pytest.mark.parametrize(("mine", "built"), list(pairs()))
def test_a_name_in_both_is_the_same_code(mine, built):
    assert same(mine, built), f"step:\n{ast.unparse(mine)}\n\nbuild.py:\n{ast.unparse(built)}"


# What of a build's model stands in no page: where its files lie, what the packaged model does not use,
# what counts and measures, and a config that is longer than a page: each page has its own fields of it.
IN_NO_PAGE = {
    37: {"installed", "packaged_weights", "stretch"},
    38: {"DetailedConfig"},
}
MEASURING = {18: "looking inside", 38: "published shapes"}


@pytest.mark.parametrize("folder", [f for f in FOLDERS if list(f.glob("step_*.py"))], ids=lambda folder: folder.name)
def test_every_name_of_the_model_stands_in_a_page(folder):
    chapter = int(folder.name[:2])
    in_pages = set().union(*(definitions(step) for step in folder.glob("step_*.py")))
    model = model_part(folder / "build.py", MEASURING.get(chapter, "experiment"))
    assert len(model) > 9 and model - in_pages == IN_NO_PAGE.get(chapter, set())


def model_part(build, until: str) -> set[str]:
    """The functions and classes above the section of that name."""
    text = build.read_text(encoding="utf-8")
    body = ast.parse(text[: text.index(f"# {'-' * 64} {until}\n")]).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def test_the_comparison_sees_code_and_only_code():
    def tree(text: str) -> ast.AST:
        return without_docstrings(ast.parse(text).body[0])

    plain = tree("def f(x):\n    return x + 1")
    assert same(plain, tree('def f(x):\n    """Adds."""\n    return x + 1  # one'))
    assert not same(plain, tree("def f(x):\n    return x + 2"))
    assert not same(plain, tree("def f(y):\n    return y + 1"))
    assert not same(tree("class A:\n    def f(self): pass"), tree("class A:\n    def g(self): pass"))
