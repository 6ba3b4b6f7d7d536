"""What gRPC does by itself, and must not do here: shared ports and paths, calls without an end, streams, bombs, floods.

Two tenants share a network process; what one does must leave the other one's calls as they are.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kv_bench.process import free_port
from kvstore.wire import store_pb2
from network.running import (
    ENVIRONMENT,
    OPERATOR_TOKEN,
    RunningNetwork,
    Stubs,
    bearer,
    beside,
    fails,
    grpc,
    network,
    refused,
    token_file,
    token_of,
)
from service.sidecar import Sidecar
from waiting import wait_until
from workbench import MODEL, ids, random_pages, small_layout

LAYOUT = small_layout()
CODE = grpc.StatusCode
MATCH, CHECK = "/kvstore.v1.Store/Match", "/grpc.health.v1.Health/Check"


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Of a network process beside two sidecars, whose tenants are `default` and `other`."""
    with ExitStack() as stack:
        folders = {name: tmp_path_factory.mktemp(name) for name in ("default", "other")}
        for folder in folders.values():
            sidecar = stack.enter_context(Sidecar(folder))
            store = stack.enter_context(sidecar.client())
            store.namespace(model=MODEL, layout=LAYOUT).put(ids(640), random_pages(LAYOUT, 10))
        sockets = {name: folder / "kvstore.sock" for name, folder in folders.items()}
        yield beside(folders["default"], token_file(folders["default"], tuple(folders)), **sockets)


@pytest.fixture
def running(flags: list[str]) -> Iterator[RunningNetwork]:
    with network(*flags) as process:
        yield process


def works(running: RunningNetwork, tenant: str = "default") -> bool:
    caller = running.of_tenant(tenant)
    (space,) = caller.namespaces()
    found = caller.match(space.id, token_ids=ids(640)).blocks
    caller.close()
    return found == 10


def listening_at(flags: list[str], address: str) -> list[str]:
    return [address if before == "--listen" else flag for before, flag in zip(["", *flags], flags, strict=False)]


# Who calls, and until when --------------------------------------------------------------------------------------------


def test_a_call_needs_a_deadline_of_an_hour_at_most_and_a_credential(running: RunningNetwork) -> None:
    caller = running.of_tenant()
    for timeout in (None, 4000.0):
        code, text = refused(caller.namespaces, timeout)
        assert code is CODE.INVALID_ARGUMENT and "deadline" in text
    assert len(caller.namespaces(3600.0)) == 1
    request = store_pb2.NamespacesRequest()
    good = f"Bearer {token_of('default')}"
    wrong = [[], bearer("x"), bearer(""), bearer(token_of("stranger")), bearer("x" * 10_000)]
    wrong += [[("authorization", good), ("authorization", good)], [("authorization", token_of("default"))]]
    wrong += [
        [("authorization-bin", good.encode())],
        bearer(f"{token_of('default')}x"),
        bearer(token_of("default")[:-1]),
    ]
    for metadata in wrong:
        code, text = refused(caller.store.Namespaces, request, timeout=60, metadata=metadata)
        assert (code, text) == (CODE.UNAUTHENTICATED, "unknown credential")
    assert caller.store.Namespaces(request, timeout=60, metadata=[("authorization", good.replace("Bearer", "bearer"))])
    assert refused(running.caller(OPERATOR_TOKEN).namespaces)[0] is CODE.PERMISSION_DENIED
    # Nothing in a message says whose it is.
    assert not [one for one in store_pb2.MatchRequest.DESCRIPTOR.fields if "tenant" in one.name]


def test_streams_and_reflection_are_not_served(running: RunningNetwork) -> None:
    anybody = running.caller(None).channel
    for method in ("/grpc.health.v1.Health/Watch", "/kvstore.v1.Store/Purge", "/x", "/kvstore.v1.Store/",
                   "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
                   "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"):  # fmt: skip
        call = anybody.stream_stream(method, None, None)
        assert refused(list, call(iter([b""]), timeout=60))[0] is CODE.UNIMPLEMENTED


def test_a_token_file_is_exchanged_while_calls_go_on(flags: list[str], tmp_path: Path) -> None:
    tokens = token_file(tmp_path, ("default", "other"))
    at = flags.index("--token-file")
    with network(*flags[:at], "--token-file", str(tokens)) as running:
        caller, fresh = running.of_tenant(), running.caller("another-0123456789abcdef")
        assert caller.namespaces() and refused(fresh.namespaces)[0] is CODE.UNAUTHENTICATED
        tokens.write_text(tokens.read_text() + "default another-0123456789abcdef\n")

        def is_known(one: Stubs) -> bool:
            assert caller.namespaces() if one is fresh else fresh.namespaces()
            try:
                return bool(one.namespaces())
            except grpc.RpcError as error:
                assert error.code() is CODE.UNAUTHENTICATED
                return False

        wait_until(lambda: is_known(fresh))
        tokens.write_text("short")  # unusable: the last good ones stay
        errors = running.process.stderr
        assert errors is not None
        wait_until(lambda: bool(caller.namespaces() and fresh.namespaces() and select.select([errors], [], [], 0)[0]))
        assert "cannot be used" in errors.readline()
        assert caller.namespaces() and fresh.namespaces()
        tokens.write_text(f"{OPERATOR_TOKEN}\ndefault another-0123456789abcdef\n")
        wait_until(lambda: not is_known(caller))


# Where it listens -----------------------------------------------------------------------------------------------------


def test_a_second_one_is_refused_the_port(running: RunningNetwork, flags: list[str]) -> None:
    line = fails(*listening_at(flags, running.target))
    assert running.target in line and "--listen" in line and works(running)


def test_a_second_one_is_refused_the_path_and_the_mode_is_no_matter_of_umask(flags: list[str], tmp_path: Path) -> None:
    path = tmp_path / "grpc.sock"
    given = listening_at(flags, f"unix:{path}")
    before = os.umask(0o000)
    try:
        with network(*given) as running:
            assert running.target == f"unix:{path}" and path.stat().st_mode & 0o777 == 0o660
            assert "another process" in fails(*given) and works(running)
            assert refused(running.caller(None).namespaces)[0] is CODE.UNAUTHENTICATED
            running.process.kill()
            running.process.wait()
        assert path.exists()  # of a process that was killed
        with network(*given) as running:
            assert works(running)
            running.process.terminate()
            assert running.process.wait(60) == 0 and not path.exists()
    finally:
        os.umask(before)
    taken = next(flag for flag in flags if flag.startswith("--socket=")).partition("=")[2].partition("=")[2]
    assert "another process" in fails(*listening_at(flags, f"unix:{taken}")) and Path(taken).is_socket()
    (tmp_path / "file").write_text("x")
    assert "no socket" in fails(*listening_at(flags, f"unix:{tmp_path / 'file'}"))
    assert "longer than" in fails(*listening_at(flags, f"unix:{tmp_path / ('x' * 120)}"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--listen", "0.0.0.0:0"], "can be reached by other hosts"),
        (["--http", "0.0.0.0:0"], "can be reached by other hosts"),
        (["--listen", "x"], "HOST:PORT"),
        (["--certificate", "/nowhere"], "belong together"),
        (["--certificate", "/nowhere", "--key", "/nowhere", "--client-ca", "/nowhere"], "No such file"),
        (["--token-file", "/nowhere"], "No such file"),
        (["--token-file", "/dev/null"], "no token"),
        (["--socket", "default=/tmp/x"], "has one already"),
    ],
)
def test_what_cannot_be_is_one_line(flags: list[str], change: list[str], words: str) -> None:
    assert words in fails(*flags, *change)


def test_callers_must_have_a_credential(flags: list[str]) -> None:
    assert "needs --token-file" in fails(*flags[: flags.index("--token-file")])


# Proxies, lengths, forms ----------------------------------------------------------------------------------------------

THROUGH_PROXY = """
import sys
from network.running import Stubs
print(len(Stubs(sys.argv[1], sys.argv[2]).namespaces()))
"""


def test_a_proxy_of_the_environment_is_nothing_to_callers_on_this_host(running: RunningNetwork) -> None:
    proxy = f"http://127.0.0.1:{free_port()}"
    environment = ENVIRONMENT | {"http_proxy": proxy, "https_proxy": proxy, "grpc_proxy": proxy}
    done = subprocess.run(
        [sys.executable, "-c", THROUGH_PROXY, running.target, token_of("default")],
        capture_output=True, text=True, timeout=120, env=environment,
    )  # fmt: skip
    assert done.stdout == "1\n", done.stderr


def test_what_is_too_long_or_packed_or_no_message_ends_its_own_call_alone(running: RunningNetwork) -> None:
    caller = running.of_tenant()
    (space,) = caller.namespaces()
    known = {"timeout": 60, "metadata": caller.metadata}
    code, _ = refused(caller.match, space.id, keys=bytes(5 << 20))
    assert code is CODE.RESOURCE_EXHAUSTED
    zeros = store_pb2.MatchRequest(namespace=space.id, prompt=store_pb2.Prompt(keys=bytes(64 << 20)))
    for request in (zeros, store_pb2.MatchRequest(namespace=space.id)):
        code, text = refused(
            caller.store.Match, request, timeout=60, metadata=caller.metadata, compression=grpc.Compression.Gzip
        )
        assert code is CODE.UNIMPLEMENTED and "gzip" in text
    code, _ = refused(
        caller.store.Namespaces,
        store_pb2.NamespacesRequest(),
        timeout=60,
        metadata=[*caller.metadata, ("x", "y" * (20 << 10))],
    )
    assert code is CODE.RESOURCE_EXHAUSTED
    for body in (b"\xff" * 100, b"\x0a\xff\xff\xff\xff\x0f", b"\x12\x03abc"):
        call = caller.channel.unary_unary(MATCH, None, None)
        code, _ = refused(call, body, **known)
        assert code in (CODE.INTERNAL, CODE.INVALID_ARGUMENT)
    nothing = caller.channel.stream_unary(MATCH, None, None)
    assert refused(nothing, iter([]), **known)[0] is CODE.INVALID_ARGUMENT
    assert caller.match(space.id, token_ids=ids(640)).blocks == 10 and works(running, "other")


# Stopped, killed, restarted -------------------------------------------------------------------------------------------


def test_a_stopped_one_is_late_a_killed_one_is_away_and_the_next_one_is_found(flags: list[str]) -> None:
    address = f"127.0.0.1:{free_port()}"
    given = listening_at(flags, address)
    with network(*given) as running:
        caller = running.of_tenant()
        assert caller.namespaces()
        os.kill(running.process.pid, signal.SIGSTOP)
        began = time.monotonic()
        assert refused(caller.namespaces, 0.05)[0] is CODE.DEADLINE_EXCEEDED
        assert time.monotonic() - began < 5
        os.kill(running.process.pid, signal.SIGCONT)
        assert caller.namespaces()
        running.process.kill()
        running.process.wait()
        wait_until(lambda: refused(caller.namespaces)[0] is CODE.UNAVAILABLE)
    with network(*given):
        wait_until(lambda: _answers(caller))


def _answers(caller: Stubs) -> bool:
    try:
        return bool(caller.namespaces())
    except grpc.RpcError as error:
        assert error.code() is CODE.UNAVAILABLE
        return False


def test_it_ends_in_order(running: RunningNetwork) -> None:
    assert works(running)
    running.process.terminate()
    out, errors = running.process.communicate(timeout=60)
    assert running.process.returncode == 0 and not out and not errors


# Floods ---------------------------------------------------------------------------------------------------------------


def test_256_calls_at_once_are_answered_or_sent_away_and_cost_others_nothing(running: RunningNetwork) -> None:
    caller, other = running.of_tenant(), running.of_tenant("other")
    (space,) = caller.namespaces()
    (others,) = other.namespaces()
    request = store_pb2.MatchRequest(namespace=space.id, prompt=store_pb2.Prompt(token_ids=ids(6400)))
    calls = [caller.store.Match.future(request, timeout=60, metadata=caller.metadata) for _ in range(256)]
    for _ in range(20):
        assert other.match(others.id, token_ids=ids(640)).blocks == 10
    codes = Counter(call.code() for call in calls)
    assert codes[CODE.OK] >= 64 and set(codes) <= {CODE.OK, CODE.RESOURCE_EXHAUSTED}, codes
    assert works(running)


def test_calls_without_a_message_hold_up_their_own_tenant_alone_and_not_for_long(running: RunningNetwork) -> None:
    caller, ends = running.of_tenant(), threading.Event()

    def never() -> Iterator[bytes]:
        ends.wait(120)
        yield from ()

    open_calls = [
        caller.channel.stream_unary(MATCH, None, None).future(never(), timeout=3600, metadata=caller.metadata)
        for _ in range(64)
    ]
    try:
        anybody = running.caller(None)
        health = anybody.channel.stream_unary(CHECK, None, None)
        open_calls += [health.future(never()) for _ in range(64)]
        assert works(running, "other")
        anybody.is_serving()
        wait_until(lambda: works_in_time(running))
        assert works(running)
        assert all(one.code() is not CODE.OK for one in open_calls if one.done())
        wait_until(lambda: all(one.done() for one in open_calls[:4]))
        assert {one.code() for one in open_calls[:4]} == {CODE.CANCELLED}
    finally:
        ends.set()
        for one in open_calls:
            one.cancel()


def works_in_time(running: RunningNetwork) -> bool:
    try:
        return works(running)
    except grpc.RpcError as error:
        assert error.code() is CODE.RESOURCE_EXHAUSTED
        return False


def test_a_flood_of_pings_ends_its_own_connection(running: RunningNetwork) -> None:
    host, _, port = running.target.rpartition(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, b""))
        raw.settimeout(60)
        seen = b""
        try:
            for number in range(1000):
                raw.sendall(_frame(6, 0, struct.pack(">Q", number)))
                assert works(running) if number == 500 else True
            while piece := raw.recv(1 << 16):
                seen += piece
        except (BrokenPipeError, ConnectionResetError):
            pass
        else:
            assert b"too_many_pings" in seen
    assert works(running) and works(running, "other")


def _frame(kind: int, flags: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", 0) + payload
