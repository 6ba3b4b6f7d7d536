"""The published form of the protocol: stubs as protoc makes them, and the fields that the product's structs have.

A field that a struct gains has to be published, or named below with the reason why not.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import re
import subprocess
import sys
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import msgspec
import pytest

from kvstore.block.account import HitTier, MissReason
from kvstore.block.identity import ExtraKey, Namespace
from kvstore.cli.ask import WarmPrompt
from kvstore.cli.report import WarmReport
from kvstore.protocol import messages as m
from kvstore.protocol.messages import MatchReply
from kvstore.status.tree import Readiness, SidecarStatus, TierStatus
from programs import ROOT, run_python
from tiering.frame import KEY_BYTES

grpc = pytest.importorskip("grpc", reason="grpcio is not installed (extra: server)")
pytest.importorskip("grpc_tools.protoc", reason="grpcio-tools is not installed (extra: test)")

from google.protobuf import descriptor_pb2  # noqa: E402
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor  # noqa: E402

from kvstore.wire import (  # noqa: E402
    admin_pb2,
    peer_pb2,
    score_pb2,
    store_pb2,
)

PROTO, WIRE = ROOT / "proto", ROOT / "kvstore" / "wire"
SOURCES = tuple(f"kvstore/wire/{name}.proto" for name in ("store", "admin", "score", "peer"))
OPTIONS = ("-I", "proto", "--python_out=.", "--pyi_out=.", "--grpc_python_out=.")
COMMAND = " ".join(("python -m grpc_tools.protoc", *OPTIONS, *SOURCES))
FILES: tuple[FileDescriptor, ...] = (
    store_pb2.DESCRIPTOR,
    admin_pb2.DESCRIPTOR,
    score_pb2.DESCRIPTOR,
    peer_pb2.DESCRIPTOR,
)
MESSAGES: dict[str, Descriptor] = {name: one for file in FILES for name, one in file.message_types_by_name.items()}

IN_JSON = (SidecarStatus, TierStatus)
"""Whose other fields are in `StatResponse.json`."""

# --- what is published of what ---------------------------------------------------------------------------------------

PUBLISHED: dict[type, tuple[str, ...]] = {
    MatchReply: ("MatchResponse",),
    m.MatchPrefix: ("MatchRequest",),
    m.Namespaces: ("NamespacesRequest",),
    m.NamespacesReply: ("NamespacesResponse",),
    m.Opened: ("Namespace",),
    Namespace: ("Namespace",),
    m.Drop: ("DropRequest",),
    m.DropAny: ("DropAnyRequest",),
    m.Counted: ("DropResponse", "DropAnyResponse"),
    m.Stat: ("StatRequest",),
    m.StatReply: ("StatResponse",),
    WarmReport: ("WarmResponse",),
    WarmPrompt: ("Prompt",),
    ExtraKey: ("ExtraKey",),
    **{one: (one.__name__,) for one in IN_JSON},
}
"""Of each struct, the messages that have its fields."""

NOT_PUBLISHED = {
    "MatchPrefix.keys": "they are in `prompt`, beside which token ids may be given",
    "MatchPrefix.counts": "a match from another host serves no engine's request here, so it is not counted",
    "MatchPrefix.request": "nor is it shown beside one",
    "MatchPrefix.counts_short": "as `counts`",
    "MatchPrefix.is_told": "as `counts`: no caller of another host reports its requests",
    "Opened.packed": "the fields of `Namespace` are published one by one, for those who do not read the packed form",
    "Counted.elsewhere": "a line for the operator on the host, who drops and purges there",
    "Counted.not_reached": "as `elsewhere`",
    "Stat.numbers_only": "for the edge, which asks the observers' socket: callers read few fields, and `json`",
    "WarmPrompt.line": "the line of a file, which the caller has",
}

PUBLISHED_OTHERWISE = {
    "MatchPrefix.namespace": "a number of one connection's; here the namespace's id",
    "Drop.namespace": "a number of one connection's; here the namespace's id",
    "Namespace.layout": "a tree of groups; here its words, since who speaks this never touches a block's bytes",
    "WarmPrompt.token_ids": "packed for the hash; here numbers",
}
"""Their field here has another type."""

ONLY_HERE = {
    "MatchRequest.prompt": "the keys, or the tokens that they are made of",
    "Namespace.block_tokens": "is in the layout of the struct",
    "Prompt.keys": "for clients that hash",
    "StatResponse.json": "all of `facts`",
    "StatResponse.version": "of the form of `json`",
}

MESSAGES_ONLY_HERE = {
    "TierRun": "a pair in `MatchReply.tiers`",
    "WarmRequest": "the arguments of `kvstore.cli.ask.warm`",
    "HealthRequest": "what GET /livez and /readyz ask",
    "HealthResponse": "what GET /livez and /readyz say",
    "ScoreRequest": "for routers: no local client asks this",
    "ScoreResponse": "for routers: no local client asks this",
    "NodeScore": "for routers: no local client asks this",
    **dict.fromkeys(
        (
            "WhoAreYouRequest",
            "WhoAreYouResponse",
            "HasRequest",
            "HasResponse",
            "OpenPullRequest",
            "OpenPullResponse",
            "OfferRequest",
            "OfferResponse",
        ),
        "between nodes: no local client asks this",
    ),
}

SHARED_MEMORY = "is about shared memory, which ends at the host"
STORING = "block bytes never travel here, so nothing is stored through it"
COURIERS_ALONE = "is for couriers, at a socket of their own on the host"
OF_A_CONNECTION = "is about the connection, which here is gRPC's"

VERBS_NOT_PUBLISHED: dict[type, str] = {
    m.UnknownVerb: "stands in the place of what is no verb here",
    m.Hello: OF_A_CONNECTION,
    m.Ping: OF_A_CONNECTION,
    m.OpenNamespace: "the server opens what a request names; the identity key that a grant holds never travels here",
    m.LeasePrefix: SHARED_MEMORY,
    m.Attach: SHARED_MEMORY,
    m.Release: SHARED_MEMORY,
    m.ReleaseRequest: SHARED_MEMORY,
    m.ReportFrame: SHARED_MEMORY,
    m.Extents: SHARED_MEMORY,
    m.Reserve: STORING,
    m.Commit: STORING,
    m.Abort: STORING,
    m.Persist: STORING,
    m.Tell: "for engines on the host, which know what became of their requests",
    m.Why: "names requests of all tenants: for an operator on the host",
    m.Prefixes: "shows what tenants ask for most: for an operator on the host",
    m.Changes: "for engines on the host, which tell routers of it in their own events",
    m.Which: "for engines on the host, which look for the states of recurrent layers",
    m.Await: "for engines on the host: a look-up from another host does not wait",
    m.Cancel: "ends what only engines on the host may ask for",
    m.SealTicket: "for engines on the host, which hand their prompts over",
    m.OpenTicket: "for engines on the host, to which prompts are handed over",
    m.Locate: "for engines on the host, which decide whether to have blocks brought there",
    m.Adopt: COURIERS_ALONE,
    m.Questions: COURIERS_ALONE,
    m.Holdings: COURIERS_ALONE,
    m.Purge: "retires a tenant's key for good: for an operator on the host",
    m.Record: "hands out what tenants look up: for an operator on the host",
}

BYTES_FIELDS = {
    "kvstore.v1.Prompt.keys": "prefix keys of 32 bytes",
    "kvstore.v1.ExtraKey.value": "a part of what keys are hashed from, at most 4,096 bytes",
    **dict.fromkeys(
        (
            *(f"kvstore.v1.WhoAreYou{one}" for one in ("Request.node", "Response.node", "Response.incarnation")),
            "kvstore.v1.WhoAreYouResponse.fingerprints",
            *(
                f"kvstore.v1.{verb}Request.{one}"
                for verb in ("Has", "OpenPull", "Offer")
                for one in ("fingerprint", "namespace", "keys", "node", "nonce", "mac")
            ),
            "kvstore.v1.OpenPullResponse.token",
            "kvstore.v1.OpenPullResponse.nonce",
        ),
        "nodes, fingerprints, keys, nonces, MACs and tokens, each of a fixed length",
    ),
}
"""All that may be bytes: keys, digests, cursors."""

# --- the stubs -------------------------------------------------------------------------------------------------------


def _protoc(*arguments: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", *arguments, *SOURCES],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr


def _generator() -> str:
    """The release of grpcio-tools that wrote the stubs."""
    versions = set(re.findall(r"GRPC_GENERATED_VERSION = '(.*)'", (WIRE / "store_pb2_grpc.py").read_text()))
    (version,) = versions
    return version


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> dict[str, descriptor_pb2.FileDescriptorProto]:
    """What protoc reads in each file of proto/, its comments included."""
    out = tmp_path_factory.mktemp("described") / "set"
    _protoc("-I", "proto", "--include_source_info", f"--descriptor_set_out={out}")
    return {one.name: one for one in descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file}


def test_the_stubs_are_those_that_protoc_makes(tmp_path: Path) -> None:
    installed = importlib.metadata.version("grpcio-tools")
    if installed != _generator():
        pytest.skip(f"grpcio-tools {installed} is installed, and {_generator()} wrote the stubs: they differ in that")
    _protoc(*(one.replace("_out=.", f"_out={tmp_path}") for one in OPTIONS))
    made = {path.name: path.read_bytes() for path in (tmp_path / "kvstore" / "wire").iterdir()}
    kept = {path.name: path.read_bytes() for path in WIRE.iterdir() if "_pb2" in path.name and path.is_file()}
    differing = sorted(name for name in made.keys() | kept.keys() if made.get(name) != kept.get(name))
    assert differing == [], f"not what protoc makes of proto/; in the folder of pyproject.toml run\n    {COMMAND}"


def test_every_file_of_proto_is_in_the_command() -> None:
    assert {path.relative_to(PROTO).as_posix() for path in PROTO.rglob("*.proto")} == set(SOURCES)


def test_the_stubs_say_what_the_proto_files_say(described: dict[str, descriptor_pb2.FileDescriptorProto]) -> None:
    """With any release of grpcio-tools."""
    for file in FILES:
        kept, read = descriptor_pb2.FileDescriptorProto(), descriptor_pb2.FileDescriptorProto()
        file.CopyToProto(kept)
        read.CopyFrom(described[file.name])
        read.ClearField("source_code_info")
        for field in [field for message in read.message_type for field in _all_fields(message)]:
            field.ClearField("json_name")  # follows from the name, and stubs leave it out
        assert kept == read, f"{file.name} has changed; in the folder of pyproject.toml run\n    {COMMAND}"


def _all_fields(message: descriptor_pb2.DescriptorProto) -> Iterator[descriptor_pb2.FieldDescriptorProto]:
    yield from message.field
    for inner in message.nested_type:
        yield from _all_fields(inner)


def test_the_floors_of_the_server_extra_are_what_the_stubs_need() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["server"]
    floors = dict(re.findall(r"^(grpcio|protobuf)>=([\d.]+)", "\n".join(extra), re.MULTILINE))
    (protobuf,) = set(re.findall(r"# Protobuf Python Version: (\S+)", (WIRE / "store_pb2.py").read_text()))
    assert floors == {"grpcio": _generator(), "protobuf": protobuf}


# --- conventions -----------------------------------------------------------------------------------------------------


def test_each_call_is_unary_and_has_messages_of_its_own() -> None:
    methods = [one for file in FILES for service in file.services_by_name.values() for one in service.methods]
    for method in methods:
        assert (method.input_type.name, method.output_type.name) == (f"{method.name}Request", f"{method.name}Response")
        assert not (method.client_streaming or method.server_streaming), "a stream holds a thread for its life"
    assert {one.name for one in methods} == {
        "Match",
        "Namespaces",
        "Drop",
        "Warm",
        "Stat",
        "Health",
        "DropAny",
        "Score",
        "WhoAreYou",
        "Has",
        "OpenPull",
        "Offer",
    }


def test_all_of_it_is_kvstore_v1_and_has_no_enums() -> None:
    for file in FILES:
        assert file.package == "kvstore.v1"
        assert not file.enum_types_by_name and not any(one.enum_types for one in file.message_types_by_name.values())


def test_each_message_field_and_call_has_a_comment(described: dict[str, descriptor_pb2.FileDescriptorProto]) -> None:
    silent = []
    for file in described.values():
        said = {tuple(at.path) for at in file.source_code_info.location if at.leading_comments.strip()}
        for number, message in enumerate(file.message_type):
            named = [(f"{message.name}.{one.name}", (4, number, 2, at)) for at, one in enumerate(message.field)]
            silent += [name for name, path in [(message.name, (4, number)), *named] if path not in said]
        for number, service in enumerate(file.service):
            named = [(f"{service.name}.{one.name}", (6, number, 2, at)) for at, one in enumerate(service.method)]
            silent += [name for name, path in [(service.name, (6, number)), *named] if path not in said]
    assert silent == []


def test_no_field_can_carry_a_payload() -> None:
    found = {
        field.full_name
        for message in _all_messages()
        for field in message.fields
        if field.type in (FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_GROUP)
    }
    assert found == set(BYTES_FIELDS)
    of_others = {
        field.message_type.full_name
        for message in _all_messages()
        for field in message.fields
        if field.message_type is not None and field.message_type.file not in FILES
    }
    assert of_others == set(), "what these hold is not looked at here, and google.protobuf.Any holds everything"


def _all_messages() -> Iterator[Descriptor]:
    """Those inside others too: the entries of maps."""
    waiting = list(MESSAGES.values())
    while waiting:
        message = waiting.pop()
        yield message
        waiting += message.nested_types


# --- words -----------------------------------------------------------------------------------------------------------


def test_reasons_and_tiers_travel_as_their_words() -> None:
    reply = store_pb2.MatchResponse(blocks=len(HitTier))
    for tier in HitTier:
        reply.tiers.add(tier=tier, blocks=1)
    for reason in MissReason:
        reply.reason = reason
        read = store_pb2.MatchResponse.FromString(reply.SerializeToString())
        assert MissReason(read.reason) is reason
        assert [HitTier(run.tier) for run in read.tiers] == list(HitTier)
    assert store_pb2.MatchResponse().reason == ""
    assert "" not in [*MissReason, *HitTier], "says that there is none"


def test_the_words_are_listed_for_other_languages() -> None:
    text = (PROTO / "kvstore" / "wire" / "store.proto").read_text()
    lists = re.search(r"//   tiers +(?P<tiers>.*?)//   reasons +(?P<reasons>.*?)//\n", text, re.DOTALL)
    assert lists is not None
    assert lists["tiers"].replace("//", "").split() == list(HitTier)
    assert lists["reasons"].replace("//", "").split() == list(MissReason)


def test_the_states_of_health_are_listed_too(described: dict[str, descriptor_pb2.FileDescriptorProto]) -> None:
    file = described["kvstore/wire/admin.proto"]
    number = [one.name for one in file.message_type].index("HealthResponse")
    at = [one.name for one in file.message_type[number].field].index("state")
    (comment,) = [one for one in file.source_code_info.location if list(one.path) == [4, number, 2, at]]
    listed = re.findall(r"^   (\w+)  ", comment.leading_comments, re.MULTILINE)
    assert listed == list(Readiness)


def test_a_chain_of_the_longest_keys_fits_into_a_message() -> None:
    asked = store_pb2.MatchRequest(namespace="0" * 64, prompt=store_pb2.Prompt(keys=bytes(m.MAX_KEYS * KEY_BYTES)))
    assert asked.ByteSize() < 4 << 20


# --- fields ----------------------------------------------------------------------------------------------------------


def test_every_verb_and_answer_is_published_or_has_a_reason_not_to_be() -> None:
    assert set(m.Verb.__args__) - set(PUBLISHED) == set(VERBS_NOT_PUBLISHED)
    assert not set(PUBLISHED) & set(VERBS_NOT_PUBLISHED)


@pytest.mark.parametrize("struct", PUBLISHED, ids=lambda struct: struct.__name__)
def test_each_field_is_published(struct: type) -> None:
    wrong = [problem for name in PUBLISHED[struct] for problem in _problems(struct, MESSAGES[name])]
    assert wrong == [], "append it to the message in proto/, or name it in a table above with the reason"


def test_no_message_has_a_field_that_no_struct_has() -> None:
    of_structs: dict[str, set[str]] = {}
    for struct, names in PUBLISHED.items():
        for name in names:
            of_structs.setdefault(name, set()).update(_hints(struct))
    assert MESSAGES.keys() - of_structs.keys() == MESSAGES_ONLY_HERE.keys()
    more = {f"{name}.{field.name}" for name in of_structs for field in MESSAGES[name].fields} - {
        f"{name}.{field}" for name, fields in of_structs.items() for field in fields
    }
    assert more == set(ONLY_HERE), "the field has gone from its struct: reserve its number and its name"


def test_the_tables_name_what_there_is() -> None:
    fields = {f"{struct.__name__}.{name}": struct for struct in PUBLISHED for name in _hints(struct)}
    assert (NOT_PUBLISHED.keys() | PUBLISHED_OTHERWISE.keys()) <= fields.keys()
    for field in NOT_PUBLISHED:
        name = field.partition(".")[2]
        assert not any(name in MESSAGES[one].fields_by_name for one in PUBLISHED[fields[field]]), (
            f"{field} is published"
        )


def test_a_field_that_is_not_published_is_reported() -> None:
    class MatchReplyOfTomorrow(MatchReply, frozen=True):
        elsewhere: int = 0

    (problem,) = _problems(MatchReplyOfTomorrow, MESSAGES["MatchResponse"])
    assert problem == "MatchReplyOfTomorrow.elsewhere: MatchResponse has no such field"


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (float, "uint32 cannot be a float"),
        (list[int], "uint32 cannot be a list of int"),
        (str, "uint32 cannot be a str"),
        (bool, "uint32 cannot be a bool"),
        (int | None, "not set cannot be told from 0"),
    ],
)
def test_a_field_of_another_type_is_reported(kind: Any, said: str) -> None:
    assert said in _type_problem(kind, MESSAGES["MatchResponse"].fields_by_name["blocks"])


def _hints(struct: type) -> dict[str, Any]:
    return typing.get_type_hints(struct)  # without what is declared of metrics


def _defaults(struct: type) -> dict[str, object]:
    if issubclass(struct, msgspec.Struct):
        return {one.name: one.default for one in msgspec.structs.fields(struct) if one.default is not msgspec.NODEFAULT}
    return {one.name: one.default for one in dataclasses.fields(struct) if one.default is not dataclasses.MISSING}


def _problems(struct: type, message: Descriptor) -> Iterator[str]:
    """What a message lacks of a struct's fields."""
    defaults = _defaults(struct)
    for name, kind in _hints(struct).items():
        full = f"{struct.__name__}.{name}"
        if full in NOT_PUBLISHED:
            continue
        field = message.fields_by_name.get(name)
        if field is None and struct in IN_JSON:
            continue
        if field is None:
            yield f"{full}: {message.name} has no such field"
            continue
        if full not in PUBLISHED_OTHERWISE:
            problem = _type_problem(kind, field)
            if problem:
                yield f"{full}: {problem}"
        if defaults.get(name) and not field.has_presence:
            yield f"{full}: not set means {defaults[name]!r}, and cannot be told from {field.default_value!r}"


SCALARS: dict[type, tuple[str, ...]] = {
    bool: ("bool",),
    int: ("uint32", "uint64"),
    float: ("double",),
    str: ("string",),
    bytes: ("bytes",),
}
TYPE_NAMES = {
    getattr(FieldDescriptor, name): name.removeprefix("TYPE_").lower()
    for name in vars(FieldDescriptor)
    if name.startswith("TYPE_")
}


def _type_problem(kind: Any, field: FieldDescriptor) -> str:
    """Why a field cannot say what an annotation says; "" where it can."""
    if get_origin(kind) in (Union, types.UnionType):
        (kind,) = [one for one in get_args(kind) if one is not type(None)]
        is_word = isinstance(kind, type) and issubclass(kind, StrEnum)  # none of which is ""
        if not field.is_repeated and not field.has_presence and not is_word:
            return f"not set cannot be told from {field.default_value!r}"
    said = TYPE_NAMES[field.type]
    origin = get_origin(kind)
    if origin in (list, tuple, Sequence):
        item = get_args(kind)[0]
        if not field.is_repeated or _is_map(field):
            return f"{said} cannot be a list of {_name(item)}"
        return _item_problem(item, field)
    if origin in (dict, Mapping):
        if not _is_map(field):
            return f"{said} cannot be a table"
        entry = field.message_type.fields_by_name
        key, value = get_args(kind)
        return _item_problem(key, entry["key"]) or _item_problem(value, entry["value"])
    if field.is_repeated:
        return f"many of {said} cannot be a {_name(kind)}"
    return _item_problem(kind, field)


def _item_problem(kind: Any, field: FieldDescriptor) -> str:
    """As `_type_problem`, of one of many."""
    said = TYPE_NAMES[field.type]
    if get_origin(kind) is tuple:  # a pair as a message, its fields in that order
        if field.message_type is None or len(field.message_type.fields) != len(get_args(kind)):
            return f"{said} cannot be a {_name(kind)}"
        pairs = zip(get_args(kind), field.message_type.fields, strict=True)
        return next((problem for one, inner in pairs if (problem := _type_problem(one, inner))), "")
    if kind in PUBLISHED:
        is_it = field.message_type is not None and field.message_type.name in PUBLISHED[kind]
        return "" if is_it else f"{said} cannot be a {_name(kind)}"
    plain = next((one for one in SCALARS if isinstance(kind, type) and issubclass(kind, one)), None)
    return "" if plain is not None and said in SCALARS[plain] else f"{said} cannot be a {_name(kind)}"


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _name(kind: Any) -> str:
    return str(getattr(kind, "__name__", kind))


# --- who imports them ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("module", ["kvstore.service.serve", "kvstore.client.sidecar_store"])
def test_neither_the_sidecar_nor_its_client_imports_grpc(module: str, tmp_path: Path) -> None:
    foreign = ("grpc", "google.protobuf", "kvstore.wire")
    program = f"import sys, {module}; print(*[one for one in {foreign!r} if one in sys.modules])"
    found = run_python(program, cwd=tmp_path)
    assert not found, f"importing {module} also imports {found}"
