"""Finds the place of a mutant by names and syntax, and puts the mutant there."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, structs

HERE = Path(__file__).parent
TREE = HERE.parents[1]
ENVIRONMENTS = {"main": ".venv", "engines": ".venv-engines"}
_SOURCES = {"kv_kernels": "kernels"}
"""Folders of packages that do not lie in the root."""

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class DoesNotFit(Exception):
    """An entry and the tree do not belong together; the text says how."""


class Mutant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry. room: the file that it stands in."""

    id: str
    why: str
    function: str
    old: str
    new: str
    tests: Annotated[tuple[str, ...], Meta(min_length=1)]
    environment: Literal["main", "engines"] = "main"
    room: str = ""

    @property
    def path(self) -> str:
        """The source file that it changes, from the root of the tree."""
        module = self.function.partition(":")[0]
        return str(Path(_SOURCES.get(module.partition(".")[0], ""), *module.split(".")).with_suffix(".py"))


def load(folder: Path = HERE) -> list[Mutant]:
    """All entries. Raises `DoesNotFit` for one that is not as it should be."""
    mutants = []
    for file in sorted(folder.glob("*.toml")):
        try:
            read = msgspec.toml.decode(file.read_text(), type=dict[str, list[Mutant]])
        except msgspec.ValidationError as error:
            raise DoesNotFit(f"{file.name}: {error}") from None
        mutants += [structs.replace(mutant, room=file.stem) for mutant in read["mutant"]]
    return mutants


def mutated(mutant: Mutant, source: str) -> str:
    """The source file with the mutant in it, without comments. Raises `DoesNotFit`."""
    tree = ast.parse(source)
    place = _definition(tree, mutant.function)
    old, new = _parsed(mutant.old, "old"), _parsed(mutant.new, "new")
    if len(old) == 1 and isinstance(old[0], ast.Expr):
        if not (len(new) == 1 and isinstance(new[0], ast.Expr)):
            raise DoesNotFit("old is an expression, and new is none")
        found = _equal_expressions(place, old[0].value)
    else:
        found = _equal_statements(place, old)
    if len(found) != 1:
        raise DoesNotFit(f"old stands {len(found)} times in {mutant.function}, and should stand there once")
    before = ast.dump(tree)
    changed = _Replaced(found[0], new).visit(tree)
    if ast.dump(changed) == before:
        raise DoesNotFit("new is the same as old")
    return ast.unparse(changed)


def missing_test(test: str, tree: Path = TREE) -> str | None:
    """What a test's id names that is not there; None where all of it is, but for parameters."""
    file, *names = test.partition("[")[0].split("::")
    if not (tree / file).is_file():
        return f"no file {file}"
    top = ast.parse((tree / file).read_text()).body
    body: Sequence[ast.stmt] = top
    for name in names:
        found = _named(body, name)
        if found is None:
            return f"no {name} in {file}"
        if not isinstance(found, Definition):
            return None  # a state machine's tests
        body = [*found.body, *_inherited(found, top)]
    return None


def _named(body: Sequence[ast.stmt], name: str) -> ast.stmt | None:
    for one in body:
        if isinstance(one, Definition) and one.name == name:
            return one
        if isinstance(one, ast.Assign) and any(ast.unparse(target) == name for target in one.targets):
            return one
    return None


def _inherited(found: Definition, top: Sequence[ast.stmt]) -> list[ast.stmt]:
    """What a class has of those of its file, as a contract's tests."""
    bases = [ast.unparse(base) for base in getattr(found, "bases", ())]
    classes = [one for one in top if isinstance(one, ast.ClassDef) and one.name in bases]
    return [stmt for one in classes for stmt in (*one.body, *_inherited(one, top))]


def _definition(tree: ast.Module, function: str) -> ast.AST:
    place: ast.AST = tree
    for name in function.partition(":")[2].split("."):
        named = [one for one in _definitions(place) if one.name == name]
        if len(named) != 1:
            raise DoesNotFit(f"{function}: {len(named)} definitions of {name}")
        (place,) = named
    return place


def _definitions(place: ast.AST) -> Iterator[Definition]:
    """Those that stand in it, but not in one another."""
    for node in ast.iter_child_nodes(place):
        if isinstance(node, Definition):
            yield node
        else:
            yield from _definitions(node)


def _parsed(text: str, what: str) -> list[ast.stmt]:
    try:
        return ast.parse(textwrap.dedent(text).strip()).body
    except SyntaxError:
        pass
    try:  # an expression of several lines
        return [ast.Expr(ast.parse(f"({text})", mode="eval").body)]
    except SyntaxError as error:
        raise DoesNotFit(f"{what} is neither an expression nor statements: {error}") from None


def _equal_expressions(place: ast.AST, old: ast.expr) -> list[list[ast.AST]]:
    want = ast.dump(old)
    return [[node] for node in ast.walk(place) if isinstance(node, ast.expr) and ast.dump(node) == want]


def _equal_statements(place: ast.AST, old: Sequence[ast.stmt]) -> list[list[ast.AST]]:
    want = [ast.dump(one) for one in old]
    return [
        list(body[at : at + len(want)])
        for body in _bodies(place)
        for at in range(len(body) - len(want) + 1)
        if [ast.dump(one) for one in body[at : at + len(want)]] == want
    ]


def _bodies(place: ast.AST) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(place):
        for _, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                yield value


class _Replaced(ast.NodeTransformer):
    """The tree with other nodes in place of these, which stand in a row."""

    def __init__(self, nodes: Sequence[ast.AST], new: Sequence[ast.stmt]) -> None:
        self._nodes, self._new = nodes, new

    def visit(self, node: ast.AST) -> ast.AST | list[ast.stmt] | None:
        if node is self._nodes[0]:
            return self._new[0].value if isinstance(node, ast.expr) else list(self._new)  # type: ignore[attr-defined]
        if any(node is one for one in self._nodes):
            return None
        return super().generic_visit(node)
