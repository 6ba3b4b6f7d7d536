"""Measures a tree laid out like this repository: its rooms and the floors they stand on, and its proportions.

A room is a folder, or a file that lies flat in `kvstore/`, where the composition root and the settings stand at heights
of their own. A room's floor is the longest way down from it, counted in rooms.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

PACKAGES = {
    "kvstore": "kvstore",
    "tiering": "tiering",
    "engine_adapter": "engine_adapter",
    "kv_kernels": "kernels/kv_kernels",
}
"""The product's packages, and where they lie."""

GENERATED = ("kvstore/wire",)
"""Folders of generated stubs. They are neither rooms nor files of the house: protoc writes them, so their proportions
are its own, and their classes are services that have the names of classes here."""

_BROAD = ("Exception", "BaseException")


def _is_broad(node: ast.AST) -> bool:
    """Whether this catches errors that it does not name, and keeps them from its caller."""
    if isinstance(node, ast.ExceptHandler):
        caught = _names(node.type) if node.type is not None else ["BaseException"]
        if "Exception" in caught:
            return True
        return "BaseException" in caught and not isinstance(node.body[-1], ast.Raise)  # else it only tidies up
    if isinstance(node, ast.Call) and "suppress" in _names(node.func):
        return any(name in _BROAD for argument in node.args for name in _names(argument))
    if isinstance(node, ast.FunctionDef) and node.name in ("__exit__", "__aexit__"):
        returned = [one.value for one in ast.walk(node) if isinstance(one, ast.Return)]
        return any(isinstance(one, ast.Constant) and one.value is True for one in returned)
    return False


def _names(node: ast.expr) -> list[str]:
    """The last names of an expression, or of each in a tuple: `suppress` of `contextlib.suppress`."""
    if isinstance(node, ast.Tuple):
        return [name for one in node.elts for name in _names(one)]
    if isinstance(node, ast.Starred):
        return _names(node.value)
    return [node.id] if isinstance(node, ast.Name) else [node.attr] if isinstance(node, ast.Attribute) else []


def _classes(tree: ast.Module) -> list[ast.ClassDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def _bases(node: ast.ClassDef) -> list[str]:
    return [name for base in node.bases for name in _names(base.value if isinstance(base, ast.Subscript) else base)]


def _members(node: ast.ClassDef) -> set[str]:
    """Methods, and attributes that the class or its methods assign."""
    found = set()
    for one in ast.walk(node):
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(one.name)
        elif isinstance(one, ast.Name | ast.Attribute) and isinstance(one.ctx, ast.Store):
            found |= set(_names(one))
    return found


@dataclass(frozen=True)
class House:
    """The product's sources below `root`."""

    root: Path

    @cached_property
    def files(self) -> dict[str, Path]:
        """Each module by its dotted name."""
        found = {}
        for package, folder in PACKAGES.items():
            for path in sorted((self.root / folder).rglob("*.py")):
                if str(path.parent.relative_to(self.root)) in GENERATED:
                    continue
                parts = [package, *path.relative_to(self.root / folder).with_suffix("").parts]
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
        return found

    @cached_property
    def trees(self) -> dict[str, ast.Module]:
        """Each module, parsed."""
        return {module: ast.parse(path.read_bytes()) for module, path in self.files.items()}

    def room(self, module: str) -> str:
        """The room that a module stands in."""
        path = self.files[module]
        is_flat = path.parent in (self.root / "kvstore", self.root / "engine_adapter")
        return str((path if is_flat else path.parent).relative_to(self.root))

    @cached_property
    def arrows(self) -> dict[str, dict[str, list[str]]]:
        """Which room imports which other, and by what: `importer > imported`."""
        arrows: dict[str, dict[str, list[str]]] = {self.room(module): {} for module in self.files}
        for module, tree in self.trees.items():
            for imported in sorted(self._imports(module, tree)):
                here, there = self.room(module), self.room(imported)
                if here != there:
                    arrows[here].setdefault(there, []).append(f"{module} > {imported}")
        return arrows

    def _imports(self, module: str, tree: ast.Module) -> Iterator[str]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names if alias.name in self.files)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    named = f"{node.module}.{alias.name}"
                    if named in self.files or node.module in self.files:
                        yield named if named in self.files else node.module

    def circle(self) -> list[str]:
        """Rooms that import each other in a circle, the first one again at the end; nothing where there is none."""
        done: set[str] = set()

        def walk(room: str, way: list[str]) -> list[str]:
            if room in way:
                return [*way[way.index(room) :], room]
            if room in done:
                return []
            for below in self.arrows[room]:
                found = walk(below, [*way, room])
                if found:
                    return found
            done.add(room)
            return []

        return next((found for room in self.arrows if (found := walk(room, []))), [])

    @cached_property
    def floors(self) -> dict[str, int]:
        """Of each room; there must be no circle."""
        floors: dict[str, int] = {}

        def floor(room: str) -> int:
            if room not in floors:
                floors[room] = 1 + max((floor(below) for below in self.arrows[room]), default=0)
            return floors[room]

        for room in self.arrows:
            floor(room)
        return floors

    def drawn(self) -> str:
        """The rooms from the top floor down, each with what it imports."""
        rooms = sorted(self.arrows, key=lambda room: (-self.floors[room], room))
        lines = [
            f"{self.floors[room]:2}  {room:24} > {' '.join(sorted(self.arrows[room]))}".rstrip(" >") for room in rooms
        ]
        arrows = sum(map(len, self.arrows.values()))
        return "\n".join([f"{len(rooms)} rooms on {max(self.floors.values())} floors, {arrows} arrows", *lines])

    def folders(self) -> Counter[str]:
        """How many files each folder has."""
        return Counter(str(path.parent.relative_to(self.root)) for path in self.files.values())

    def lines(self) -> dict[str, int]:
        """How many lines each file has."""
        return {str(path.relative_to(self.root)): len(path.read_text().splitlines()) for path in self.files.values()}

    def classes(self) -> dict[str, list[str]]:
        """In which modules each class name is defined, at any depth."""
        found = defaultdict(list)
        for module, tree in self.trees.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    found[node.name].append(module)
        return found

    def wide_constructors(self, most: int) -> dict[str, int]:
        """Classes whose constructor takes more than so many parameters."""
        found = {}
        for tree in self.trees.values():
            for one in _classes(tree):
                for method in one.body:
                    if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                        count = len(method.args.args) + len(method.args.kwonlyargs) - 1
                        if count > most:
                            found[one.name] = count
        return found

    def lone_protocols(self) -> dict[str, list[str]]:
        """Protocols that fewer than two classes of the product and its tests implement, by name or by all methods."""
        texts = [path.read_bytes() for path in sorted((self.root / "tests").rglob("*.py"))]
        tests = [ast.parse(text) for text in texts if b"class " in text]
        classes = [one for tree in [*tests, *self.trees.values()] for one in _classes(tree)]
        named = {one.name: one for one in classes}  # of a name in tests and in the product, the product's

        @cache
        def members(one: ast.ClassDef) -> set[str]:
            bases = {named[name] for name in _bases(one) if name in named} - {one}
            return _members(one).union(*map(members, bases))

        protocols = [one for tree in self.trees.values() for one in _classes(tree) if "Protocol" in _bases(one)]
        others = [one for one in classes if "Protocol" not in _bases(one)]
        found = {}
        for protocol in protocols:
            asked = {name for name in members(protocol) if not name.startswith("_") or name == "__call__"}
            makers = [one.name for one in others if protocol.name in _bases(one) or asked <= members(one)]
            if len(makers) < 2:
                found[protocol.name] = makers
        return found

    def broad_handlers(self) -> Counter[str]:
        """How many places of each module catch whatever is raised: `except Exception`, `except BaseException` that does
        not end with `raise`, a bare `except`, `suppress` of either, and an `__exit__` that returns True."""
        found = Counter[str]()
        for module, tree in self.trees.items():
            for node in ast.walk(tree):
                found[module] += _is_broad(node)
        return +found

    def words(self, pattern: str) -> int:
        """How often the sources say a word."""
        return sum(len(re.findall(pattern, path.read_text())) for path in self.files.values())
