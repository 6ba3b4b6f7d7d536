"""Server reflection: off by default; with it callers need no .proto files, and a stream costs its own caller alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from network.running import (
    OPERATOR_TOKEN,
    RunningNetwork,
    Stubs,
    bearer,
    beside,
    grpc,
    network,
    refused,
    token_file,
    token_of,
)
from service.sidecar import Sidecar
from waiting import wait_until
from workbench import MODEL, ids, random_pages, small_layout

pytest.importorskip("grpc_reflection", reason="grpcio-reflection is not installed (extra: server)")
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_reflection.v1alpha import reflection_pb2

CODE = grpc.StatusCode
VERSIONS = ("v1", "v1alpha")
Ask = reflection_pb2.ServerReflectionRequest


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    folder = tmp_path_factory.mktemp("sidecar")
    with Sidecar(folder) as sidecar, sidecar.client() as store:
        layout = small_layout()
        store.namespace(model=MODEL, layout=layout).put(ids(640), random_pages(layout, 10))
        yield beside(folder, token_file(folder))


@pytest.fixture(scope="module")
def running(flags: list[str]) -> Iterator[RunningNetwork]:
    with network(*flags, "--reflection") as process:
        yield process


def info(caller: Stubs, version: str = "v1") -> Any:
    return caller.channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        Ask.SerializeToString,
        reflection_pb2.ServerReflectionResponse.FromString,
    )


def told(caller: Stubs, *asked: Any, version: str = "v1") -> list[Any]:
    return list(info(caller, version)(iter(asked), timeout=60, metadata=caller.metadata))


def test_it_is_off_unless_it_is_asked_for(flags: list[str]) -> None:
    with network(*flags) as process:
        for version in VERSIONS:
            code, _ = refused(told, process.of_tenant(), Ask(list_services=""), version=version)
            assert code is CODE.UNIMPLEMENTED


@pytest.mark.parametrize("version", VERSIONS)
def test_a_caller_that_knows_no_message_matches_a_prompt(running: RunningNetwork, version: str) -> None:
    caller = running.of_tenant()
    services, files = told(
        caller, Ask(list_services=""), Ask(file_containing_symbol="kvstore.v1.Store"), version=version
    )
    names = {one.name for one in services.list_services_response.service}
    assert {"kvstore.v1.Store", "kvstore.v1.Score", "kvstore.v1.Admin", "grpc.health.v1.Health"} <= names
    pool = descriptor_pool.DescriptorPool()
    packed = [
        descriptor_pb2.FileDescriptorProto.FromString(one)
        for one in files.file_descriptor_response.file_descriptor_proto
    ]
    for one in reversed(packed):  # what it imports comes behind it
        pool.Add(one)
    methods = pool.FindServiceByName("kvstore.v1.Store").methods_by_name

    def call(name: str, **given: Any) -> Any:
        asked, answered = (
            message_factory.GetMessageClass(one) for one in (methods[name].input_type, methods[name].output_type)
        )
        verb = caller.channel.unary_unary(f"/kvstore.v1.Store/{name}", asked.SerializeToString, answered.FromString)
        return verb(asked(**given), timeout=60, metadata=caller.metadata)

    (space,) = call("Namespaces").namespaces
    assert call("Match", namespace=space.id, prompt={"token_ids": ids(640)}).blocks == 10
    assert told(running.operator(), Ask(list_services=""), version=version) == [services], "any credential will do"


def test_it_takes_a_credential_and_a_deadline_as_every_call(running: RunningNetwork) -> None:
    for caller in (running.caller(None), running.caller("stranger-0123456789abcdef")):
        assert refused(told, caller, Ask(list_services=""))[0] is CODE.UNAUTHENTICATED
    caller = running.of_tenant()
    endless = info(caller)(iter([Ask(list_services="")]), metadata=caller.metadata)
    assert refused(list, endless)[0] is CODE.INVALID_ARGUMENT


def test_odd_requests_are_answered_or_end_their_stream(running: RunningNetwork) -> None:
    caller = running.of_tenant()
    extension = reflection_pb2.ExtensionRequest
    odd = [
        Ask(),
        Ask(file_by_filename="../../etc/passwd"),
        Ask(file_containing_symbol="\0" * 100_000),
        Ask(all_extension_numbers_of_type="no.such"),
        *(
            Ask(file_containing_extension=extension(containing_type=name, extension_number=number))
            for name in ("", "kvstore.v1.Prompt", "google.protobuf.FileOptions")
            for number in (-(1 << 31), -1, 0, (1 << 31) - 1)
        ),
    ]
    answers = told(caller, *odd)
    assert len(answers) == len(odd) and all(one.HasField("error_response") for one in answers)
    raw = caller.channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", None, None)
    with pytest.raises(grpc.RpcError):
        list(raw(iter([b"\xff" * 100]), timeout=60, metadata=bearer(token_of("default"))))
    assert told(caller, Ask(list_services=""))


def test_streams_that_are_kept_open_end_and_take_nothing_from_others(running: RunningNetwork) -> None:
    caller, operator, ends = running.of_tenant(), running.caller(OPERATOR_TOKEN), threading.Event()
    (space,) = caller.namespaces()

    def patient() -> Iterator[Any]:
        yield Ask(list_services="")
        ends.wait(120)

    streams = [info(operator)(patient(), timeout=100, metadata=operator.metadata) for _ in range(20)]
    try:
        assert next(streams[0]).list_services_response.service
        for _ in range(20):
            assert caller.match(space.id, token_ids=ids(640)).blocks == 10
        for _ in range(3):  # as the lane makes room, its own caller is served too
            assert told(operator, Ask(list_services=""))
        wait_until(lambda: streams[0].done() and streams[0].code() is CODE.CANCELLED)
    finally:
        ends.set()
        for one in streams:
            one.cancel()
