"""README.md and docs/ against the product: commands parse, settings are settings, links lead somewhere; and the
commands of some pages run, as they are written, with a real sidecar.

How a page marks a block of code (the word behind the fence; what is behind that word no reader sees):

    ```                 commands, or what they print: lines that begin with `kvstore`, or with `$ kvstore`, are commands
    ```sh               commands; on a page of `RUN` the test runs them, in order
    ```sh elsewhere     commands that need an engine, root, a network or much memory: parsed, not run
    ```text             what a command prints, and synopses
    ```toml             settings of `kvstore serve`, whole enough to start with

On a page of `RUN` each block has its word.
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import json
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import benches  # noqa: F401  # a checkout has more words of `kvstore bench` than what is installed
import recorded
from kvstore.cli.main import app
from kvstore.cli.terminal import UsageError, typer
from kvstore.service.settings import read_settings
from recorded import PUBLIC, path_of

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
COMMANDS = ("", "sh", "text")
RUN = ("docs/operate.md", "docs/plan.md", "docs/policies.md", "docs/prompts.md")
"""start.md and sidecar.md run in test_roles.py, with what is installed by their roles."""
SERVERS = re.compile(r"kvstore (serve|console|network)\b(?!.*&\s*$)")
"""Commands that run until they are told to end; one that a shell is to run in the background is the shell's."""
SECONDS = 240.0
"""For a block, on a machine that is busy."""
ELSEWHERE = "elsewhere"
SPANS = ("match", "lease", "load")
"""Names that OpenTelemetry sees, and no commands."""
NAMING = (".py", ".toml", ".yml", ".yaml", ".json", ".proto", ".service", ".sh")
"""Suffixes of files that name pages."""
NAMED_PAGE = re.compile(r"docs/[\w-]+\.md(?:#[\w-]+)?")


@dataclass(frozen=True)
class Block:
    """A fenced block. tag: the word behind the fence; flags: the words behind that one."""

    page: str
    line: int
    tag: str
    flags: tuple[str, ...]
    text: str

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"


@cache
def text_of(page: str) -> str:
    return (ROOT / page).read_text("utf-8")


@cache
def blocks_of(page: str) -> tuple[Block, ...]:
    found, opened, lines = [], None, list[str]()
    for number, line in enumerate(text_of(page).splitlines(), 1):
        stripped = line.strip()
        if opened is None and stripped.startswith("```"):
            tag, *flags = stripped[3:].split() or [""]
            opened, lines = (number, tag, tuple(flags)), []
        elif opened is not None and stripped == "```":
            found.append(Block(page, *opened, "\n".join(lines)))
            opened = None
        elif opened is not None:
            lines.append(line)
    assert opened is None, f"{page}: the block that begins in line {opened} does not end"
    return tuple(found)


def prose_of(page: str) -> str:
    """Without blocks and comments; lines keep their numbers."""
    text = re.sub(
        r"^[ >]*```.*?^[ >]*```$", lambda found: "\n" * found[0].count("\n"), text_of(page), flags=re.M | re.S
    )
    return re.sub(r"<!--.*?-->", "", text, flags=re.S)


def commands_in(text: str) -> Iterator[tuple[str, bool]]:
    """Each command of a block in one line, continued lines and those of one quoted text joined; and whether words
    behind it say what it does, as in a list of commands."""
    lines = text.splitlines()
    if any(line.startswith("$ ") for line in lines):
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    whole, is_listed = "", False
    for line in lines:
        if not whole and line.startswith("kvstore "):
            line, *said = re.split(r"(?<=\S) {2,}(?=[^\s-])", line)
            is_listed = bool(said) and not said[0].startswith(("#", "|", "&", ">"))
        if line.endswith("\\"):
            whole += line[:-1].rstrip() + " "
            continue
        whole += line.strip() if whole.endswith(" ") else line
        try:
            shlex.split(whole, comments=True)
        except ValueError:
            whole += "\n"
            continue
        yield whole, is_listed
        whole, is_listed = "", False
    if whole:
        yield whole, is_listed


def kvstore_words(command: str) -> Iterator[list[str]]:
    """The words behind each `kvstore` that a shell would start."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars="();<>|&")
    lexer.commenters, lexer.whitespace_split = "#", True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if word and set(word) <= set("();<>|&"):
            while words and re.fullmatch(r"\w+=.*", words[0]):
                words.pop(0)
            if words and words[0].rpartition("/")[2] == "kvstore":
                yield words[1:]
            elif "-m" in words and words[words.index("-m") + 1 :][:1] == ["kvstore"]:
                yield words[words.index("-m") + 2 :]
            words = []
        else:
            words.append(word)
    for inner in re.findall(r"\"[^\"]*\$\((kvstore [^()]*)\)", command):  # in quotes, where the lexer sees one word
        yield from kvstore_words(inner)


def is_synopsis(words: Sequence[str]) -> bool:
    """It shows what may be given: `kvstore stat [--watch [SECONDS]]`."""
    return any(re.match(r"\[|.*\]$|\.\.\.", word) for word in words)


@cache
def command_line() -> Any:
    return typer.main.get_command(app)


def leaf_of(words: Sequence[str]) -> tuple[Any, str, list[str]]:
    """The command that the words begin with, its name and its own words."""
    command, rest, name = command_line(), list(words), "kvstore"
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        word = rest.pop(0)
        assert word in command.commands, f"there is no command {name} {word}"
        command, name = command.commands[word], f"{name} {word}"
    return command, name, rest


def check_parses(words: Sequence[str]) -> None:
    """As the command line itself takes them."""
    command, name, rest = leaf_of(words)
    if hasattr(command, "commands"):
        assert not rest or rest == ["--version"] or rest == ["--help"], f"{name} {rest}"
        return
    try:
        command.make_context(name, rest).close()
    except UsageError as error:
        raise AssertionError(f"{name} {shlex.join(rest)}: {error.format_message()}") from None


def check_names(words: Sequence[str]) -> None:
    """Commands and options of a synopsis exist."""
    command, name, rest = leaf_of([re.split(r"[\[\]]", word)[0] or word for word in words])
    options = {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)}
    given = set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", " ".join([*rest, *words])))
    assert given <= options | {"-h", "--help"}, f"{name} has no {given - options}"


def test_the_reader_of_blocks_reads_what_shells_read() -> None:
    joined = "a \\\n  b\nc 'x\ny' # z\n"
    assert list(commands_in(joined)) == [("a b", False), ("c 'x\ny' # z", False)]
    assert list(commands_in("$ kvstore stat\nkvstore: no\n")) == [("kvstore stat", False)]
    assert list(commands_in("kvstore stat   what's held\n")) == [("kvstore stat", True)]
    line = "X=1 kvstore stat --json | jq . && .venv/bin/kvstore fsck kv > out; id=$(kvstore namespaces) # kvstore no"
    assert list(kvstore_words(line)) == [["stat", "--json"], ["fsck", "kv"], ["namespaces"]]
    with pytest.raises(AssertionError, match="no command"):
        check_parses(["start"])
    for wrong in (["stat", "--wach"], ["drop"], ["bench", "tiers", "--only"], ["demo", "--requests", "many"]):
        with pytest.raises(AssertionError, match=f"kvstore {wrong[0]}"):
            check_parses(wrong)
    with pytest.raises(AssertionError, match="--tenants"):
        check_names("prefixes [--tenants NAME]".split())
    check_names("stat [--watch [SECONDS]]".split())


@pytest.mark.parametrize("page", PAGES)
def test_commands_parse(page: str) -> None:
    for block in blocks_of(page):
        if block.tag not in COMMANDS:
            continue
        for command, is_listed in commands_in(block.text):
            try:
                for words in kvstore_words(command):
                    (check_names if is_listed or is_synopsis(words) else check_parses)(words)
            except AssertionError as error:
                raise AssertionError(f"{block.name}: {error}") from None
            except ValueError:  # quotes that do not end
                assert block.tag in ("", "text"), f"{block.name}: not a shell's: {command}"
    for code in re.findall(r"`kvstore ([a-z][^`]*)`", prose_of(page)):
        if code in SPANS:
            continue
        try:
            check_names(code.split())
        except AssertionError as error:
            raise AssertionError(f"{page}: `kvstore {code}`: {error}") from None


@pytest.mark.parametrize("page", PAGES)
def test_blocks_of_data_are_what_they_are_called(page: str) -> None:
    for block in blocks_of(page):
        try:
            if block.tag == "toml":
                read_settings(block.text, name=block.name)
            elif block.tag == "json":
                json.loads(block.text)
            elif block.tag == "python":
                ast.parse(block.text)
        except Exception as error:  # whichever reader it was
            raise AssertionError(f"{block.name}: {error}") from error


@cache
def anchors_of(page: str) -> frozenset[str]:
    """Of headings as GitHub makes them, and those that stand there by name."""
    found, seen = set(re.findall(r'<a (?:id|name)="([^"]+)"', text_of(page))), dict[str, int]()
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", prose_of(page), re.M):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)|<[^>]*>", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        count = seen[slug] = seen.get(slug, -1) + 1
        found.add(f"{slug}-{count}" if count else slug)
    return frozenset(found)


def check_link(page: str, target: str) -> None:
    path, _, anchor = target.partition("#")
    file = (ROOT / page).parent.joinpath(path).resolve() if path else ROOT / page
    assert file.exists(), f"{page}: there is no {target}"
    if anchor and file.suffix == ".md":
        assert anchor in anchors_of(file.relative_to(ROOT).as_posix()), f"{page}: {target} has no such heading"


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    prose = re.sub(r"`[^`\n]*`", "", prose_of(page))
    targets = re.findall(r"\]\(([^)\s]+)(?: \"[^\"]*\")?\)", prose) + re.findall(r'(?:src|href)="([^"]+)"', prose)
    for target in targets:
        if not re.match(r"[a-z]+:", target):
            check_link(page, target)
    for file in re.findall(r"\b(?:tests|benchmarks)/[\w/]+\.py\b", (ROOT / page).read_text("utf-8")):
        assert (ROOT / file).is_file(), f"{page}: there is no {file}"


def test_pages_that_other_files_name_are_there() -> None:
    for folder in ("kvstore", "engine_adapter", "kernels", "tiering", "deploy", "tests", "benchmarks", "proto"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix not in NAMING or path.name == Path(__file__).name:
                continue
            for target in NAMED_PAGE.findall(path.read_text("utf-8")):
                check_link(path.relative_to(ROOT).as_posix(), os.path.relpath(ROOT / target, path.parent))


@pytest.mark.parametrize("name", PUBLIC)
def test_the_traces_are_the_ones_that_the_page_fetches(name: str) -> None:
    digest = hashlib.sha256(gzip.decompress(path_of(name).read_bytes())).hexdigest()
    assert text_of("docs/traces.md").count(digest) == 2
    assert f"{digest}  {name}.jsonl\n" in text_of("docs/traces.md")


def test_the_index_names_every_page() -> None:
    index = text_of("docs/README.md")
    missing = [page for page in PAGES if page not in ("README.md", "docs/README.md") and f"({page[5:]}" not in index]
    assert missing == [], "docs/README.md is the list of all pages"


def run_blocks(page: str) -> list[Block]:
    """Those that the test runs; each block of such a page has its word."""
    assert [block.name for block in blocks_of(page) if not block.tag] == [], "say sh, sh elsewhere, text, ..."
    return [block for block in blocks_of(page) if block.tag == "sh" and ELSEWHERE not in block.flags]


class Reader:
    """Someone who types a page's commands: servers in one terminal, and all else in another."""

    def __init__(self, folder: Path, programs: Path = Path(sys.executable).parent) -> None:
        self._folder, self._log = folder, (folder / "typed.log").open("w+b")
        self._environment = {key: value for key, value in os.environ.items() if not key.startswith("KVSTORE_")}
        self._environment |= {"HOME": str(folder), "PATH": f"{programs}:{os.environ['PATH']}"}
        self._servers: dict[str, subprocess.Popen[str]] = {}
        self._statuses, told = os.pipe()
        self._told = told
        self._shell = self._start(["bash"], stdin=subprocess.PIPE, stdout=self._log, pass_fds=(told,))
        os.close(told)

    def _start(self, command: list[str], **more: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            cwd=self._folder,
            env=self._environment,
            stderr=self._log,
            text=True,
            **more,
        )

    def typed(self, most: int | None = 4000) -> str:
        """What was printed so far, the last of it for messages."""
        self._log.flush()
        return Path(self._log.name).read_text(errors="replace")[-most if most else 0 :]

    def serve(self, command: str) -> None:
        """In the terminal of the last one of its kind, which Ctrl-C has ended."""
        kind = command.split()[1]
        if kind in self._servers:
            self._stop(self._servers[kind])
        server = self._servers[kind] = self._start(["bash", "-c", f"exec {command}"], stdout=subprocess.PIPE)
        assert server.stdout is not None
        assert server.stdout.readline(), f"{command} printed nothing:\n{self.typed()}"
        threading.Thread(target=server.wait).start()  # a script may wait for its end, too

    def type(self, text: str) -> None:
        """Into the shell; each command of it has to succeed."""
        assert self._shell.stdin is not None
        self._shell.stdin.write(f"set -e -o pipefail\n{text}\necho 0 >&{self._told}\n")
        self._shell.stdin.flush()
        ready, _, _ = select.select([self._statuses], [], [], SECONDS)
        assert ready and os.read(self._statuses, 16), f"failed, or took {SECONDS:.0f} s:\n{text}\n{self.typed()}"

    def type_block(self, block: str) -> None:
        """Servers where they belong."""
        text = ""
        for line in block.splitlines():
            if SERVERS.match(line):
                self.type(text)
                self.serve(line.partition("  #")[0])
                text = ""
            else:
                text += f"{line}\n"
        self.type(text)

    @staticmethod
    def _stop(process: subprocess.Popen[str]) -> None:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.wait(60)

    def close(self) -> None:
        for server in self._servers.values():
            self._stop(server)
        self._shell.kill()
        self._shell.wait()
        os.close(self._statuses)
        self._log.close()


def a_reader_of(page: str, folder: Path) -> None:
    """Has the files that the page takes for granted: a model's, prompts, a recording, the public traces."""
    if page == "docs/plan.md":
        config = folder / "path" / "to" / "config.json"
        config.parent.mkdir(parents=True)
        shutil.copy(ROOT / "kvstore" / "demo" / "trained" / "config.json", config)
        requests = [
            recorded.line(range(100 * number, 100 * number + 40), timestamp=1000 * number) for number in range(50)
        ]
        (folder / "requests.jsonl").write_text("\n".join(requests))
    elif page == "docs/policies.md":
        for name in PUBLIC:
            (folder / f"{name}.jsonl.gz").symlink_to(path_of(name))
        requests = [
            recorded.line([*range(100), 1000 + number], 101 * 64, timestamp=1000 * number) for number in range(500)
        ]
        (folder / "traffic.jsonl").write_text("\n".join(requests))
    elif page == "docs/prompts.md":
        tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed (extra: hf)")
        model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0}, unk_token="?"))
        model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        (folder / "path" / "to" / "model").mkdir(parents=True)
        model.save(str(folder / "path" / "to" / "model" / "tokenizer.json"))
        rules = " ".join(f"Rule {number}: name the source of what you write." for number in range(100))
        prompts = [json.dumps({"prompt": f"{rules} Today is day {day}."}) for day in range(20)]
        (folder / "prompts.jsonl").write_text("\n".join(prompts))
        requests = [json.dumps({"token_ids": [*range(1000), day]}) for day in range(20)]
        (folder / "requests.jsonl").write_text("\n".join(requests))


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    reader = Reader(tmp_path)
    yield reader
    reader.close()


def test_a_command_that_fails_stops_the_reader(reader: Reader) -> None:
    reader.type("x=1\nkvstore --version > version")
    reader.type('test "$x" = 1; grep -q "^kvstore " version')  # the same shell, and this product
    with pytest.raises(AssertionError, match="kvstore stat"):
        reader.type("kvstore stat | cat")


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN)
def test_a_page_runs_as_it_is_written(page: str, reader: Reader, tmp_path: Path) -> None:
    a_reader_of(page, tmp_path)
    blocks = run_blocks(page)
    assert blocks, f"{page} has no command that could be run"
    for block in blocks:
        reader.type_block(block.text)
