"""Reads the source of a tree and lists what breaks the house's rules on rooms, floors and doors.

It parses and never imports, so it sees code that is not reachable and needs none of the engines. The rules are the
tables at the top; every exemption in them carries its reason. `violations(root)` works on any folder laid out like
this repository, which is how test_architecture.py shows that each rule bites.

What it cannot see: names built at run time (`getattr(time, name)`), and a clock or a disk that a third-party
library reaches for by itself.
"""

import ast
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

# --- rooms and floors ------------------------------------------------------------------------------------------------

FIRST_PARTY = frozenset({"kv_kernels", "tiering", "kvstore", "engine_adapter"})
ROOM_FOLDERS = ("kernels", "tiering", "kvstore", "engine_adapter")

# The longest matching prefix of a module's dotted name decides. Imports point down or stay level.
FLOORS = {
    "kv_kernels": 0,
    "tiering": 1,
    "kvstore": 2,
    "engine_adapter": 3,
    "kvstore.cli": 4,
    "kvstore.__main__": 4,
    "kvstore.demo": 4,
    "kvstore.traffic": 4,
    "kvstore.edge": 4,
    "kvstore.console": 4,
    "kvstore.openai": 4,
    "kvstore.prove": 4,
    "kvstore.network": 4,
    "kvstore.courier": 4,
    "kvstore.doctor": 4,
}

# People's entrances, and who may import them besides themselves: the command line starts the others.
ENTRANCES = {
    "kvstore.cli": ("kvstore.__main__",),
    "kvstore.__main__": (),
    "kvstore.demo": ("kvstore.cli",),
    "kvstore.traffic": ("kvstore.cli",),
    "kvstore.edge": ("kvstore.cli", "kvstore.console", "kvstore.network"),
    "kvstore.console": ("kvstore.cli",),
    "kvstore.openai": ("kvstore.cli", "kvstore.traffic", "kvstore.prove"),
    "kvstore.prove": ("kvstore.cli",),
    "kvstore.network": ("kvstore.cli",),
    "kvstore.courier": ("kvstore.cli", "kvstore.network"),
    "kvstore.elsewhere": ("kvstore.cli",),
    "kvstore.doctor": ("kvstore.cli",),
}

# What a room imports of this house at most, where that is less than what lies below it. A room is named by its folder.
ROOMS_IMPORT_ONLY = {
    "kvstore.block": "tiering kv_kernels",
    # Says what tiers counted, and knows neither blocks nor clients.
    "kvstore.status": "tiering",
    "kvstore.protocol": "kvstore.block kvstore.status tiering",
    "kvstore.client": "kvstore.block kvstore.protocol kvstore.status kvstore.config tiering kv_kernels",
    "kvstore.keys": "kvstore.block kvstore.config tiering",
    "kvstore.core": "kvstore.block kvstore.protocol kvstore.status kvstore.config tiering",
    # Pure: callers hold the store's lock.
    "kvstore.core.index": "kvstore.block tiering",
    # A part of the sidecar that is handed in where couriers are wanted.
    "kvstore.elsewhere": (
        "kvstore.block kvstore.protocol kvstore.status kvstore.core kvstore.service kvstore.node tiering"
    ),
    # A client of the sidecar, and no part of it; of the service it knows the settings.
    "kvstore.edge": (
        "kvstore.block kvstore.protocol kvstore.status kvstore.client kvstore.listeners kvstore.service.settings "
        "tiering.clock"
    ),
    # A part of the edge; of insight what plans.
    "kvstore.console": (
        "kvstore.edge kvstore.service.settings kvstore.block kvstore.protocol kvstore.status kvstore.client "
        "kvstore.config kvstore.listeners kvstore.insight.models kvstore.insight.plan tiering.clock tiering.faults "
        "tiering.tier"
    ),
    # Engines by their HTTP API alone: whether there is a store behind them is theirs to know.
    "kvstore.openai": "kvstore.block kvstore.config kvstore.listeners tiering.clock",
    # Engines by their HTTP API alone, as above: what starts them is handed in.
    "kvstore.prove": "kvstore.openai kvstore.block",
    # Knows addresses, connections and HTTP, and nothing of what is served.
    "kvstore.listeners": "kvstore.block tiering.clock tiering.faults",
    # Looks at what a sidecar and an engine are given, and imports no engine.
    "kvstore.doctor": (
        "kvstore.block kvstore.protocol kvstore.status kvstore.client kvstore.config kvstore.keys kvstore.node "
        "kvstore.service.serve kvstore.service.settings kvstore.insight.models kvstore.insight.served "
        "engine_adapter.paged.settings tiering"
    ),
    # A part of the edge, or of the transfer agent.
    "kvstore.network": (
        "kvstore.edge kvstore.service.settings kvstore.block kvstore.protocol kvstore.status kvstore.client "
        "kvstore.config kvstore.listeners kvstore.wire kvstore.courier kvstore.peers kvstore.pool tiering.clock "
        "tiering.files tiering.frame tiering.remote"
    ),
    # Pure, so that a simulator runs it: what is elsewhere, and not how it is reached.
    "kvstore.pool": "kvstore.block",
    "tiering.remote": "tiering.frame tiering.errors tiering.clock",
    # The bytes between hosts: frames that are pinned or checked, whatever they are for.
    "kvstore.peers": "kvstore.block tiering.clock tiering.errors tiering.frame",
    # The part of the transfer agent that speaks with other nodes; a client of the sidecar as well.
    "kvstore.courier": (
        "kvstore.block kvstore.protocol kvstore.client kvstore.config kvstore.wire kvstore.pool kvstore.peers "
        "tiering.clock tiering.frame tiering.errors tiering.remote"
    ),
    "tiering.counts": "",
}

# What a room must not import although no arrow would point up, and the files of that room that may.
CLOSED_ROOMS = {
    # Kernels are reached through launchers; the rest of this room has to work where there is no triton.
    "kv_kernels": {
        "triton": (
            "kernels/kv_kernels/triton_pools.py",
            "kernels/kv_kernels/triton_digest.py",
        )
    },
    # The sidecar's process has no web framework and no grpc: the edge is a process of its own.
    "kvstore": {
        "triton": (),
        "fastapi": ("kvstore/console/http_api.py",),
        "starlette": ("kvstore/console/http_api.py",),
        "pydantic": (),
        "grpc": (
            "kvstore/network/grpc_server.py",
            "kvstore/courier/dialling.py",
            "kvstore/wire/store_pb2_grpc.py",
            "kvstore/wire/admin_pb2_grpc.py",
            "kvstore/wire/score_pb2_grpc.py",
            "kvstore/wire/peer_pb2_grpc.py",
        ),
        "grpc_health": ("kvstore/network/grpc_server.py",),
        "grpc_reflection": ("kvstore/network/grpc_server.py",),
        "google": (
            "kvstore/network/services.py",
            "kvstore/wire/store_pb2.py",
            "kvstore/wire/admin_pb2.py",
            "kvstore/wire/score_pb2.py",
            "kvstore/wire/peer_pb2.py",
        ),
        "prometheus_client": ("kvstore/status/page.py",),
        "h11": ("kvstore/listeners/http_server.py",),
        "cryptography": ("kvstore/peers/sealed.py",),
        "ucxx": ("kvstore/peers/ucx.py",),
    },
    "engine_adapter": {"triton": ()},
    "tiering": {
        "kv_kernels": (),
        "torch": (),
        "triton": (),
    },
}

# Folders of a checkout that are no packages, and modules of theirs that are never installed.
FOREIGN_FOLDERS = frozenset("kernels proto tests benchmarks kv_bench benches chaos chaos_route".split())

# Each engine is touched by the file that adapts it, so that an engine's change breaks one file.
ENGINE_FILES = {
    "transformers": ("engine_adapter/hf/layers.py", "kvstore/demo/"),
    "vllm": ("engine_adapter/vllm_connector.py", "engine_adapter/vllm_tier.py"),
    "sglang": ("engine_adapter/sglang_storage.py",),
    "lmcache": ("engine_adapter/lmcache_backend.py",),
}

TYPE_IMPORTS_ALLOWED = {
    "kvstore/__init__.py": "its type of an embedded store, which is loaded when one is opened",
}

LOCAL_IMPORTS_ALLOWED = {
    "kvstore/__init__.py": "open() hands in the codec, which imports torch, and a client needs no store of its own",
    "kvstore/cli/": "a command loads its own module only, so that --help is quick and serve stays without torch",
    "kernels/kv_kernels/routes.py": "numba is loaded with the first 8 bits: an engine's process may have to do without",
}

ENVIRONMENT_READERS = {
    "kvstore/cli/": "the environment is settings, and settings enter where a person starts the program",
}

# --- names of files --------------------------------------------------------------------------------------------------

NAMES_THAT_SAY_NOTHING = frozenset({"utils", "common", "helpers", "base", "manager"})
# With engine_adapter/ on the path, a file of an engine's name would be imported in place of the engine.
NAMES_THAT_SHADOW_ENGINES = frozenset({"vllm", "sglang", "transformers", "lmcache"})
# Packages of these names belong to others: `kernels` to Hugging Face, `proto` to proto-plus.
FOLDERS_WITHOUT_INIT = ("kernels", "proto")

# --- what is handed in -----------------------------------------------------------------------------------------------

HANDED_IN_ROOMS = ("tiering/", "kvstore/")

CLOCK, RANDOMNESS, DISK, MEMORY = "clock", "randomness", "disk", "memory"
ALL_KINDS = frozenset({CLOCK, RANDOMNESS, DISK, MEMORY})


@dataclass(frozen=True)
class Exemption:
    path: str  # a file, or a folder with its closing slash
    kinds: frozenset[str]
    reason: str


EXEMPTIONS = (
    Exemption("kvstore/__init__.py", ALL_KINDS, "open() builds what an embedded store is handed"),
    Exemption(
        "kvstore/node.py", ALL_KINDS, "the composition root: here the real clock, randomness and disk are chosen"
    ),
    Exemption("tiering/clock.py", frozenset({CLOCK}), "the real clock, for those who choose what is handed in"),
    Exemption(
        "kvstore/block/key_file.py", frozenset({RANDOMNESS}), "a new tenant's secret, which must not be foreseen"
    ),
    Exemption(
        "kvstore/keys/pool_keys.py", frozenset({DISK}), "the one door to a directory of secrets, which is no store's"
    ),
    Exemption("kvstore/cli/", ALL_KINDS, "a person's entrance, above the service edge"),
    Exemption("kvstore/protocol/notify_pipe.py", frozenset({DISK}), "reads and writes a pipe, which is on no disk"),
    Exemption(
        "kvstore/service/keeper.py",
        frozenset({CLOCK, DISK}),
        "a program of its own, of the standard library alone; it reads a pipe, which is on no disk",
    ),
    Exemption("kvstore/edge/tokens.py", frozenset({DISK}), "credentials, which may be exchanged while they are in use"),
    Exemption(
        "kvstore/network/grpc_server.py", frozenset({DISK}), "lists this process's own sockets, which are on no disk"
    ),
    Exemption(
        "kvstore/console/audit.py", frozenset({DISK, MEMORY}), "a log of its own; what was half written is cut off"
    ),
    Exemption("kvstore/console/part.py", frozenset({DISK}), "reads the pages that come with the package"),
    Exemption("kvstore/insight/models.py", frozenset({DISK}), "reads the table that comes with the package"),
    Exemption("kvstore/network/part.py", frozenset({DISK}), "the name of a socket that grpc binds by itself"),
    Exemption("kvstore/__main__.py", ALL_KINDS, "a person's entrance, above the service edge"),
    Exemption("kvstore/demo/", ALL_KINDS, "a person's entrance: it times real work on real files"),
    Exemption("kvstore/doctor.py", ALL_KINDS, "a person's entrance: it looks at the machine itself"),
    Exemption(
        "kvstore/traffic/",
        frozenset({RANDOMNESS, DISK}),
        "a person's entrance: it makes tokens up, and says on which machine",
    ),
    Exemption("kvstore/prove/", ALL_KINDS, "a person's entrance: it times real answers, and copies a real model"),
    Exemption("tiering/files.py", frozenset({DISK, MEMORY}), "the one door to the disk for all but slabs"),
    Exemption(
        "tiering/nvme/slab_files.py", frozenset({DISK, MEMORY}), "slabs on a disk, with the buffers of direct I/O"
    ),
    Exemption(
        "tiering/nvme/lmdb_index.py", frozenset({DISK}), "LMDB opens its file by itself; here it is checked before"
    ),
    Exemption("tiering/policies/lazy_memory.py", frozenset({MEMORY}), "private zeros in place of those of numpy"),
    Exemption(
        "tiering/dram/extents.py", frozenset({MEMORY}), "the one maker of shared memory: memfd, size, map, advice"
    ),
)


def _members(module: str, names: str) -> tuple[str, ...]:
    return tuple(f"{module}.{name}" for name in names.split())


# `module.*` means every name of the module but those in HARMLESS. Mentioning one of these counts as calling it:
# `clock=time.monotonic` as a default is the same hole as a call.
HANDED_IN_NAMES: dict[str, tuple[str, ...]] = {
    CLOCK: (
        *_members(
            "time",
            "time time_ns monotonic monotonic_ns perf_counter perf_counter_ns process_time process_time_ns thread_time "
            "thread_time_ns clock_gettime clock_gettime_ns sleep localtime gmtime ctime asctime strftime",
        ),
        *_members("datetime.datetime", "now utcnow today"),
        "datetime.date.today",
    ),
    RANDOMNESS: ("random.*", "secrets.*", "numpy.random.*", "uuid.*", "os.urandom", "os.getrandom"),
    DISK: (
        *_members(
            "os",
            "open read write pread pwrite preadv pwritev readv writev lseek sendfile splice copy_file_range "
            "fsync fdatasync sync syncfs rename renames replace unlink remove removedirs rmdir mkdir makedirs "
            "link symlink readlink truncate posix_fallocate posix_fadvise stat lstat statvfs fstatvfs listdir "
            "scandir walk fwalk chmod lchmod chown lchown utime access mkfifo mknod chdir fdopen",
        ),
        *_members(
            "os.path",
            "exists lexists isfile isdir islink ismount getsize getmtime getatime getctime realpath samefile",
        ),
        *_members("io", "open open_code FileIO"),
        *("codecs.open", "gzip.open", "bz2.open", "lzma.open", "numpy.fromfile", "numpy.memmap"),
        *("shutil.*", "tempfile.*", "glob.*"),
    ),
    MEMORY: _members("os", "memfd_create ftruncate fchmod fchown"),
}

HARMLESS = {
    "random.Random": "the type of a generator that was handed in; calling it is caught below",
    "secrets.compare_digest": "a comparison, nothing random",
    "numpy.random.Generator": "the type of a generator that was handed in",
    "numpy.random.BitGenerator": "the type of a generator's source that was handed in",
    "uuid.UUID": "a value's type; parsing one draws nothing",
    "glob.escape": "text in, text out",
    "glob.translate": "text in, text out",
}

# These are types as well, which annotations may name; only calling them is the act.
HANDED_IN_CALLS = {
    "random.Random": RANDOMNESS,
    "numpy.random.Generator": RANDOMNESS,
    "mmap.mmap": MEMORY,
}

# Methods are caught by name. The first table's names mean nothing else; those of PATH_METHODS are common words
# (str.replace, files.open), so they count only on an expression that is seen to be a pathlib path.
UNMISTAKABLE_METHODS = {
    "read_text": DISK,
    "write_text": DISK,
    "read_bytes": DISK,
    "write_bytes": DISK,
    "tofile": DISK,
    "madvise": MEMORY,
}
PATH_METHODS = frozenset(
    "open read_text write_text read_bytes write_bytes unlink rename replace mkdir rmdir touch exists is_file is_dir "
    "is_symlink is_mount iterdir glob rglob walk stat lstat chmod lchmod owner group samefile symlink_to hardlink_to "
    "readlink resolve".split()
)
PATH_TYPES = frozenset({"pathlib.Path", "pathlib.PosixPath"})
# A `Files` object that was handed in has such methods too; by the house's vocabulary it is called files or disk.
HANDED_IN_RECEIVERS = ("files", "disk")

# --- what product code never does ------------------------------------------------------------------------------------

UNSAFE_MODULES = frozenset({"pickle", "_pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"})
UNSAFE_NAMES = frozenset(
    {
        "torch.load",
        "torch.serialization.load",
        "pandas.read_pickle",
        "builtins.eval",
        "builtins.exec",
        "yaml.load",
        "yaml.load_all",
        "yaml.full_load",
        "yaml.full_load_all",
        "yaml.unsafe_load",
        "yaml.unsafe_load_all",
    }
)
UNSAFE_BUILTINS = frozenset({"eval", "exec"})

ENVIRONMENT_NAMES = frozenset(
    {"os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv", "os.unsetenv", "os.path.expandvars"}
)

RULES = {
    "syntax": "every file can be parsed",
    "arrow": "imports point down",
    "entrance": "people's entrances are imported by nobody",
    "room": "some rooms import less than what lies below them",
    "closed-room": "a room imports only what it may know of",
    "engine": "each engine is imported by the file that adapts it",
    "foreign-folder": "what is not installed is not imported: tests, with their chaos device, and benchmarks",
    "local-import": "first-party imports stand at the top of the file and are real",
    "hidden-import": "what is imported can be read from the source",
    "handed-in": "clock, randomness, disk and shared memory are handed in",
    "environment": "the environment is read in one place",
    "unsafe": "no code is run from data",
    "vague-name": "a file's name says what is in it",
    "shadowing-name": "no file takes an engine's name",
    "namespace-folder": "kernels/ and proto/ have no __init__.py",
}

SKIPPED_FOLDERS = frozenset({"build", "dist", "node_modules", "__pycache__"})


@dataclass(frozen=True, order=True)
class Violation:
    path: str
    line: int
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: [{self.rule}] {self.message}"


def violations(root: Path) -> list[Violation]:
    """Everything in the tree at `root` that breaks a rule, in the order of path and line, each thing once."""
    found: set[Violation] = set()
    for path in _python_files(root):
        relative = path.relative_to(root)
        found.update(_name_violations(relative))
        if relative.parts[0] in ROOM_FOLDERS:
            found.update(_source_violations(relative.as_posix(), path.read_bytes()))
    return sorted(found)


def floor(module: str) -> int | None:
    """The floor of a dotted module name, or None for what is not ours."""
    return FLOORS.get(_longest_prefix(module, FLOORS))


def _python_files(root: Path) -> Iterator[Path]:
    for path in sorted(root.iterdir()):
        if path.is_symlink():
            continue
        if path.is_dir() and not path.name.startswith(".") and path.name not in SKIPPED_FOLDERS:
            # A virtual environment under any name holds other people's files.
            if not (path / "pyvenv.cfg").exists():
                yield from _python_files(path)
        elif path.suffix == ".py":
            yield path


def _name_violations(relative: Path) -> Iterator[Violation]:
    names = [*relative.parts[:-1], relative.stem]
    where = relative.as_posix()
    for name in names:
        if name in NAMES_THAT_SAY_NOTHING:
            yield Violation(where, 1, "vague-name", f"'{name}' says nothing; name it after what is in it")
    if names[0] == "engine_adapter":
        for name in names[1:]:
            if name in NAMES_THAT_SHADOW_ENGINES:
                yield Violation(where, 1, "shadowing-name", f"'{name}' would be imported in place of the engine")
    if relative.name == "__init__.py" and relative.parent.as_posix() in FOLDERS_WITHOUT_INIT:
        yield Violation(where, 1, "namespace-folder", f"makes {relative.parent}/ a package whose name is another's")


def _source_violations(where: str, source: bytes) -> Iterator[Violation]:
    try:
        tree = ast.parse(source, filename=where)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        yield Violation(where, line, "syntax", f"cannot be parsed: {error.__class__.__name__}: {error}")
        return
    reader = _Reader(where, tree)
    reader.visit(tree)
    yield from reader.found


class _Reader(ast.NodeVisitor):
    """Walks one file and notes what breaks a rule."""

    def __init__(self, where: str, tree: ast.Module) -> None:
        self.where = where
        self.module = _module_name(where)
        self.is_package = where.endswith("/__init__.py")
        self.found: list[Violation] = []
        self.imported = _imported_names(tree)
        self.defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        self.path_names = _names_of_paths(tree, self.imported)
        self.function_depth = 0
        self.type_checking_depth = 0
        self.banned_kinds = self._banned_kinds()

    def _banned_kinds(self) -> frozenset[str]:
        if not self.where.startswith(HANDED_IN_ROOMS):
            return frozenset()
        exempt: frozenset[str] = frozenset()
        for exemption in EXEMPTIONS:
            if _covers(exemption.path, self.where):
                exempt |= exemption.kinds
        return ALL_KINDS - exempt

    def _report(self, node: ast.AST, rule: str, message: str) -> None:
        self.found.append(Violation(self.where, getattr(node, "lineno", 1), rule, message))

    # --- where a statement stands ---

    def _visit_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        # Decorators, defaults and annotations are evaluated outside, but hold no import statements.
        self.function_depth += 1
        self.generic_visit(node)
        self.function_depth -= 1

    visit_FunctionDef = _visit_function
    visit_AsyncFunctionDef = _visit_function

    def visit_If(self, node: ast.If) -> None:
        mentions = [_last_name(part) == "TYPE_CHECKING" for part in ast.walk(node.test)]
        self.type_checking_depth += any(mentions)
        self.generic_visit(node)
        self.type_checking_depth -= any(mentions)

    # --- imports ---

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._check_import(node, [alias.name])

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        source = self._absolute(node)
        for alias in node.names:
            if alias.name == "*":
                self._check_import(node, [source])
                self._report(node, "hidden-import", f"'from {source} import *' hides what is used")
                continue
            # `from a import b` may import the module a.b: both are looked at, and the stricter verdict stands.
            self._check_import(node, [source, f"{source}.{alias.name}"])
            self._check_mention(node, f"{source}.{alias.name}")

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.module.split(".")
        package = parts if self.is_package else parts[:-1]
        kept = package[: len(package) - (node.level - 1)]
        return ".".join([*kept, *([node.module] if node.module else [])])

    def _check_import(self, node: ast.AST, candidates: list[str]) -> None:
        target = candidates[-1]
        root = target.split(".")[0]
        if root in FIRST_PARTY:
            self._check_arrow(node, candidates)
            self._check_place(node, target)
        elif root in FOREIGN_FOLDERS:
            self._report(node, "foreign-folder", f"imports '{target}': '{root}' is not installed with the product")
        if root in UNSAFE_MODULES:
            self._report(node, "unsafe", f"imports '{root}', which can run code from data")
        room = self.module.split(".")[0]
        allowed_files = CLOSED_ROOMS.get(room, {}).get(root)
        if allowed_files is not None and self.where not in allowed_files:
            self._report(node, "closed-room", f"{room} must not know of '{root}'")
        engine_files = ENGINE_FILES.get(root)
        if engine_files is not None and not any(_covers(allowed, self.where) for allowed in engine_files):
            self._report(node, "engine", f"imports '{root}', which only {' and '.join(engine_files)} may")

    def _check_arrow(self, node: ast.AST, candidates: list[str]) -> None:
        target = max(candidates, key=lambda name: floor(name) or 0)
        here, there = floor(self.module) or 0, floor(target) or 0
        if there > here:
            self._report(node, "arrow", f"floor {here} imports '{target}' of floor {there}")
        self._check_room(node, target)
        for entrance, importers in ENTRANCES.items():
            if not _within(target, entrance) or _within(self.module, entrance):
                continue
            if not any(_within(self.module, one) for one in importers):
                self._report(node, "entrance", f"imports '{target}', which is an entrance for people")

    def _check_room(self, node: ast.AST, target: str) -> None:
        for room, allowed in ROOMS_IMPORT_ONLY.items():
            if _within(self.module, room) and not any(_within(target, one) for one in (room, *allowed.split())):
                self._report(node, "room", f"imports '{target}'; {room} imports {allowed} alone")

    def _check_place(self, node: ast.AST, target: str) -> None:
        if self.type_checking_depth:
            if self.where not in TYPE_IMPORTS_ALLOWED:
                self._report(
                    node, "local-import", f"imports '{target}' under TYPE_CHECKING: an arrow that is not drawn"
                )
        elif self.function_depth and not _any_covers(LOCAL_IMPORTS_ALLOWED, self.where):
            self._report(node, "local-import", f"imports '{target}' inside a function")

    # --- names and calls ---

    def visit_Name(self, node: ast.Name) -> None:
        dotted = self.imported.get(node.id)
        if dotted and isinstance(node.ctx, ast.Load):
            self._check_mention(node, dotted)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        dotted = _dotted(node, self.imported)
        if dotted is None:
            self.generic_visit(node)
        else:
            self._check_mention(node, dotted)

    def visit_Call(self, node: ast.Call) -> None:
        dotted = _dotted(node.func, self.imported)
        if isinstance(node.func, ast.Name) and dotted is None and node.func.id not in self.defined:
            self._check_builtin_call(node, node.func.id)
        if dotted is not None:
            self._check_known_call(node, dotted)
        elif isinstance(node.func, ast.Attribute):
            self._check_method(node.func)
        self.generic_visit(node)

    def _check_mention(self, node: ast.AST, dotted: str) -> None:
        dotted = _canonical(dotted)
        if _named(dotted, ENVIRONMENT_NAMES) and not _any_covers(ENVIRONMENT_READERS, self.where):
            self._report(node, "environment", f"uses {dotted}; only {' and '.join(ENVIRONMENT_READERS)} may")
        if _named(dotted, UNSAFE_NAMES):
            self._report(node, "unsafe", f"uses {dotted}, which can run code from data")
        kind = _kind_of(dotted)
        if kind in self.banned_kinds:
            self._report(node, "handed-in", f"uses {dotted}: {kind} is handed in")

    def _check_known_call(self, node: ast.Call, dotted: str) -> None:
        dotted = _canonical(dotted)
        kind = HANDED_IN_CALLS.get(dotted)
        if kind in self.banned_kinds:
            self._report(node, "handed-in", f"calls {dotted}: {kind} is handed in")
        if dotted == "importlib.import_module":
            self._check_dynamic_import(node)
        if dotted == "numpy.load" and any(keyword.arg == "allow_pickle" for keyword in node.keywords):
            self._report(node, "unsafe", "numpy.load with allow_pickle can run code from data")
        if dotted.startswith(tuple(f"{path_type}." for path_type in PATH_TYPES)):
            # Path.exists(p): the method taken from the class.
            method = dotted.rpartition(".")[2]
            if method in PATH_METHODS and DISK in self.banned_kinds:
                self._report(node, "handed-in", f"calls {dotted}: disk is handed in")

    def _check_builtin_call(self, node: ast.Call, name: str) -> None:
        if name in UNSAFE_BUILTINS:
            self._report(node, "unsafe", f"calls {name}(), which runs code from data")
        if name == "open" and DISK in self.banned_kinds:
            self._report(node, "handed-in", "calls open(): disk is handed in")
        if name == "__import__":
            self._check_dynamic_import(node)

    def _check_method(self, method: ast.Attribute) -> None:
        receiver = method.value
        if method.attr in PATH_METHODS and _is_path(receiver, self.imported, self.path_names):
            kind: str | None = DISK
        elif _last_name(receiver).strip("_").endswith(HANDED_IN_RECEIVERS):
            kind = None
        else:
            kind = UNMISTAKABLE_METHODS.get(method.attr)
        if kind in self.banned_kinds:
            self._report(method, "handed-in", f"calls .{method.attr}(): {kind} is handed in")

    def _check_dynamic_import(self, node: ast.Call) -> None:
        name = node.args[0] if node.args else None
        if isinstance(name, ast.Constant) and isinstance(name.value, str) and not name.value.startswith("."):
            self._check_import(node, [name.value])
        elif not _any_covers(LOCAL_IMPORTS_ALLOWED, self.where):
            self._report(node, "hidden-import", "imports something whose name cannot be read here")


# --- reading names ---------------------------------------------------------------------------------------------------


def _module_name(where: str) -> str:
    parts = where.removesuffix(".py").split("/")
    if parts[0] == "kernels":
        parts = parts[1:]
    if parts[-1] == "__init__":
        parts = parts[:-1]
    # A stray file directly in kernels/ stands on the floor of the kernels.
    return ".".join(parts) if parts and parts[0] in FIRST_PARTY else ".".join(["kv_kernels", *parts])


def _within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def _longest_prefix(module: str, table: dict[str, int]) -> str:
    return max((prefix for prefix in table if _within(module, prefix)), key=len, default="")


def _covers(allowed: str, where: str) -> bool:
    return where.startswith(allowed) if allowed.endswith("/") else where == allowed


def _any_covers(allowed: Iterable[str], where: str) -> bool:
    return any(_covers(one, where) for one in allowed)


def _imported_names(tree: ast.Module) -> dict[str, str]:
    """What each imported name stands for, whatever scope imports it: {'now': 'time.monotonic', 'np': 'numpy'}."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname:
                    names[alias.asname] = alias.name
                else:
                    names[alias.name.split(".")[0]] = alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def _dotted(node: ast.AST, imported: dict[str, str]) -> str | None:
    """The dotted name behind `np.random.rand`, if its first part was imported."""
    if isinstance(node, ast.Name):
        return imported.get(node.id)
    if isinstance(node, ast.Attribute):
        base = _dotted(node.value, imported)
        return f"{base}.{node.attr}" if base else None
    return None


def _canonical(dotted: str) -> str:
    for alias, name in (("posixpath.", "os.path."), ("posix.", "os."), ("_io.", "io.")):
        if dotted.startswith(alias):
            return name + dotted.removeprefix(alias)
    return dotted


def _named(dotted: str, names: Collection[str]) -> bool:
    """True for a name of the table and for what hangs on one, as `os.environ.get` hangs on `os.environ`."""
    return any(
        dotted.startswith(name.removesuffix("*")) if name.endswith(".*") else _within(dotted, name) for name in names
    )


def _kind_of(dotted: str) -> str | None:
    if _named(dotted, HARMLESS):
        return None
    return next((kind for kind, names in HANDED_IN_NAMES.items() if _named(dotted, names)), None)


def _last_name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


# --- recognising pathlib paths ---------------------------------------------------------------------------------------


def _names_of_paths(tree: ast.Module, imported: dict[str, str]) -> frozenset[str]:
    """Names, of variables and of attributes alike, that the file annotates as a path or sets to one."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and _mentions_path(node.annotation, imported):
            names.add(node.arg)
        elif isinstance(node, ast.AnnAssign) and _mentions_path(node.annotation, imported):
            names.add(_last_name(node.target))
    # An assignment may lean on one further down the file: repeat until nothing is added.
    assignments = [node for node in ast.walk(tree) if isinstance(node, ast.Assign | ast.NamedExpr)]
    while True:
        before = len(names)
        for node in assignments:
            if _is_path(node.value, imported, frozenset(names)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names.update(_last_name(target) for target in targets)
        names.discard("")
        if len(names) == before:
            return frozenset(names)


def _mentions_path(annotation: ast.AST | None, imported: dict[str, str]) -> bool:
    """True for `Path`, `Path | None` and `Optional[Path]`, not for `list[Path]`, whose own methods are a list's."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        try:
            annotation = ast.parse(annotation.value, mode="eval").body
        except SyntaxError:
            return False
    if isinstance(annotation, ast.BinOp):
        return _mentions_path(annotation.left, imported) or _mentions_path(annotation.right, imported)
    if isinstance(annotation, ast.Subscript) and _last_name(annotation.value) == "Optional":
        return _mentions_path(annotation.slice, imported)
    return annotation is not None and _dotted(annotation, imported) in PATH_TYPES


def _is_path(node: ast.AST, imported: dict[str, str], names: frozenset[str]) -> bool:
    if isinstance(node, ast.Name | ast.Attribute) and _last_name(node) in names:
        return True
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return _is_path(node.left, imported, names) or _is_path(node.right, imported, names)
    if isinstance(node, ast.Attribute):
        return node.attr == "parent" and _is_path(node.value, imported, names)
    if isinstance(node, ast.Call):
        dotted = _dotted(node.func, imported)
        if dotted in PATH_TYPES or dotted in {
            f"{path_type}.{name}" for path_type in PATH_TYPES for name in ("home", "cwd")
        }:
            return True
        makers = {
            "with_suffix",
            "with_name",
            "with_stem",
            "joinpath",
            "absolute",
            "resolve",
            "expanduser",
            "relative_to",
        }
        if isinstance(node.func, ast.Attribute) and node.func.attr in makers:
            return _is_path(node.func.value, imported, names)
    return False
