"""Names that people's dashboards, scripts, configurations and programs rely on: each that stood once still stands, or
the changelog names it with its successor.

`tests/data/names.txt` has them, a line each. `python -m test_names_kept` in `tests/` adds those that are new.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
import typer
from google.protobuf.descriptor import Descriptor, FileDescriptor

from console.running import console
from engine_adapter.connector_metrics import CONNECTOR_METRICS, FORMER_METRICS
from engine_adapter.paged.settings import ConnectorSettings
from house import House
from kvstore.block.account import MissReason
from kvstore.cli.main import app
from kvstore.cli.terminal import BAD_INPUT, CHECK_FAILED, INTERRUPTED, OK, OUT_OF_RESOURCES
from kvstore.config import kinds_of
from kvstore.edge.pages import PATHS as PAGES
from kvstore.network.query import PATHS as QUERY_PATHS
from kvstore.openai.proxy import PATHS
from kvstore.status.declared import families
from kvstore.status.tree import SidecarStatus
from kvstore.wire import admin_pb2, peer_pb2, score_pb2, store_pb2
from service.sidecar import Sidecar
from wrong_values import every_setting

ROOT = Path(__file__).resolve().parent.parent
TOKEN = "operator-" + "o" * 16
RECORDED = ROOT / "tests" / "data" / "names.txt"


def metrics() -> Iterator[str]:
    for one in (*families(SidecarStatus), *CONNECTOR_METRICS, *FORMER_METRICS):
        yield f"metric {one.name} {one.kind} {','.join(one.labels)}".rstrip()


def settings() -> Iterator[str]:
    for section, key, _, _ in every_setting():
        yield f"setting {section.removesuffix('.NAME')}.{key}"


def adapter_settings() -> Iterator[str]:
    for name in kinds_of(ConnectorSettings):
        yield f"setting kv_connector_extra_config.{name}"


def commands(command: Any = None, name: str = "kvstore") -> Iterator[str]:
    command = command or typer.main.get_command(app)
    for one in command.params:
        yield from (f"command {name} {word}" for word in (*one.opts, *one.secondary_opts) if word.startswith("-"))
    for word, inner in getattr(command, "commands", {}).items():
        yield f"command {name} {word}"
        yield from commands(inner, f"{name} {word}")


def exits() -> Iterator[str]:
    table = {"ok": OK, "check failed": CHECK_FAILED, "bad input": BAD_INPUT, "out of resources": OUT_OF_RESOURCES}
    for name, status in {**table, "interrupted": INTERRUPTED}.items():
        yield f"exit {status} {name}"


def routes() -> Iterator[str]:
    for path in PAGES:
        yield f"route sidecar {path}"
    for path in (*PATHS, "/health", "/v1/models"):
        yield f"route pd-proxy {path}"
    yield from (f"route network {path}" for path in QUERY_PATHS)


def console_fields() -> Iterator[str]:
    """Routes and fields of a running console's own document, with an operator's actions."""
    with TemporaryDirectory() as folder, Sidecar(Path(folder)) as sidecar:
        flags = ["--operator", str(sidecar.admin_path), "--audit-file", str(Path(folder) / "audit")]
        with console(sidecar.observe_path, *flags, tokens=TOKEN) as shown:
            document = shown.ask("/openapi.json").json
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"route console {method} {path}"
            yield from (f"route console {method} {path}?{one['name']}" for one in operation.get("parameters", ()))
            answer = operation["responses"]["200"]["content"]["application/json"]["schema"]
            asked = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            for way, schema in (("answer", answer), ("body", asked)):
                yield from schema_fields(schema, document["components"]["schemas"], f"field console {path} {way}")


def schema_fields(schema: Any, named: Any, path: str) -> Iterator[str]:
    """Paths of the JSON that a schema allows."""
    if isinstance(schema, list):
        for one in schema:
            yield from schema_fields(one, named, path)
    elif isinstance(schema, dict):
        if "$ref" in schema:
            yield from schema_fields(named[schema["$ref"].rpartition("/")[2]], named, path)
        for field, inner in schema.get("properties", {}).items():
            yield f"{path}.{field}"
            yield from schema_fields(inner, named, f"{path}.{field}")
        for part in ("items", "anyOf", "oneOf", "prefixItems", "additionalProperties"):
            yield from schema_fields(schema.get(part), named, path)


def structs(kind: Any, path: str) -> Iterator[str]:
    """The JSON fields of a report and of what it holds."""
    for one in msgspec.structs.fields(kind):
        yield f"field {path}.{one.encode_name}"
        yield from inner_structs(one.type, f"{path}.{one.encode_name}")


def inner_structs(kind: Any, path: str) -> Iterator[str]:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield from structs(kind, path)
    elif is_dataclass(kind) and isinstance(kind, type):
        for one in fields(kind):
            yield f"field {path}.{one.name}"
    else:
        for argument in getattr(kind, "__args__", ()):
            yield from inner_structs(argument, path)


def messages() -> Iterator[str]:
    """Each tagged message of the sockets, with its fields by place."""
    found = set()
    for module in House(ROOT).files:
        if module.startswith(("kvstore.protocol", "kvstore.client")):
            for one in vars(importlib.import_module(module)).values():
                if isinstance(one, type) and issubclass(one, msgspec.Struct) and one.__struct_config__.tag is not None:
                    found.add(one)
    for kind in found:
        config = kind.__struct_config__
        for at, one in enumerate(msgspec.structs.fields(kind)):
            yield f"wire {kind.__name__}={config.tag!r} {at if config.array_like else ''} {one.encode_name}"
        yield f"wire {kind.__name__}={config.tag!r}"


def protobuf() -> Iterator[str]:
    for module in (admin_pb2, peer_pb2, score_pb2, store_pb2):
        file: FileDescriptor = module.DESCRIPTOR
        for service in file.services_by_name.values():
            yield from (f"grpc {one.full_name}" for one in service.methods)
        for message in file.message_types_by_name.values():
            yield from message_fields(message)


def message_fields(message: Descriptor) -> Iterator[str]:
    yield from (f"grpc {message.full_name} {one.number} {one.name}" for one in message.fields)
    for inner in message.nested_types:
        if not inner.GetOptions().map_entry:
            yield from message_fields(inner)


def names() -> set[str]:
    found = {f"miss {reason}" for reason in MissReason}
    for one in (metrics, settings, adapter_settings, commands, exits, routes, console_fields, messages, protobuf):
        found |= set(one())
    return found | set(structs(SidecarStatus, "stat"))


@pytest.fixture(scope="module")
def now() -> set[str]:
    return names()


@pytest.mark.parametrize("kind", ["metric", "setting", "command", "exit", "route", "field", "wire", "grpc", "miss"])
def test_what_stood_stands_or_is_in_the_changelog(kind: str, now: set[str]) -> None:
    recorded = [line for line in RECORDED.read_text().splitlines() if line.split()[0] == kind]
    assert recorded
    changed = set(re.findall(r"`([^`]+)`", (ROOT / "CHANGELOG.md").read_text()))
    gone = {name for name in recorded if name not in now}
    assert {name for name in gone if not changed & {name.split(" ", 1)[1], *re.split(r"[ .]", name)}} == set()


def test_a_name_that_goes_is_found(now: set[str]) -> None:
    """The lists are of what the programs have, not only of what was recorded."""
    assert {line.split()[0] for line in now} == {line.split()[0] for line in RECORDED.read_text().splitlines()}


if __name__ == "__main__":
    stood = set(RECORDED.read_text().splitlines()) if RECORDED.exists() else set()
    RECORDED.write_text("\n".join(sorted(stood | names())) + "\n")
