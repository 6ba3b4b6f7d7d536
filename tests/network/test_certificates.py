"""Callers with certificates: who they are, whom the door does not know, and certificates that are exchanged."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.edge.tokens import Caller
from kvstore.network.credentials import caller_of_uris, node_of_uris
from kvstore.wire import admin_pb2
from network.running import Issuer, RunningNetwork, beside, certified, fails, grpc, refused
from service.sidecar import Sidecar
from waiting import wait_until
from workbench import MODEL, ids, random_pages, small_layout

LAYOUT = small_layout()
CODE = grpc.StatusCode
pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="the openssl command is not installed")


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    with Sidecar(tmp_path_factory.mktemp("sidecar")) as running, running.client() as store:
        store.namespace(model=MODEL, layout=LAYOUT).put(ids(640), random_pages(LAYOUT, 10))
        yield running


@pytest.fixture(scope="module")
def issuer(tmp_path_factory: pytest.TempPathFactory) -> Issuer:
    return Issuer(tmp_path_factory.mktemp("certificates") / "ca")


@pytest.fixture(scope="module")
def running(sidecar: Sidecar, issuer: Issuer) -> Iterator[RunningNetwork]:
    with certified(sidecar.path.parent, issuer) as process:
        yield process


def test_the_certificate_says_who_calls(running: RunningNetwork, issuer: Issuer) -> None:
    tenant = running.caller(None, credentials=issuer.credentials("tenant", "URI:kvstore:tenant:default"))
    (space,) = tenant.namespaces()
    assert tenant.match(space.id, token_ids=ids(640)).blocks == 10 and tenant.is_serving()
    operator = running.caller(None, credentials=issuer.credentials("operator", "URI:kvstore:operator"))
    assert operator.ask(operator.admin.Health, admin_pb2.HealthRequest()).alive
    assert refused(operator.namespaces)[0] is CODE.PERMISSION_DENIED
    elsewhere = running.caller(None, credentials=issuer.credentials("elsewhere", "URI:kvstore:tenant:elsewhere"))
    code, text = refused(elsewhere.namespaces)
    assert code is CODE.PERMISSION_DENIED and "'elsewhere' has no socket here" in text
    for number, names in enumerate(
        ("DNS:kvstore.tenant.default", "URI:kvstore:node:" + "0" * 32, "URI:kvstore:tenant:", "URI:https://x/kvstore:tenant:default",
         "URI:kvstore:tenant:default,URI:kvstore:operator", "email:kvstore:tenant:default@x")
    ):  # fmt: skip
        nobody = running.caller(None, credentials=issuer.credentials(f"nobody{number}", names))
        assert refused(nobody.namespaces)[0] is CODE.UNAUTHENTICATED, names
    with_token = running.caller("default-token-0123456789abcdef", credentials=issuer.credentials("none", "DNS:x"))
    assert refused(with_token.namespaces)[0] is CODE.UNAUTHENTICATED


def test_names_of_tenants_may_be_quoted_and_are_taken_whole() -> None:
    assert caller_of_uris([b"kvstore:tenant:a%20b", "spiffe://x"]) == Caller("a b")
    assert caller_of_uris(["kvstore:operator"]) == Caller(None)
    for uris in ([], ["kvstore:operators"], ["KVSTORE:operator"], ["kvstore:tenant:a", "kvstore:tenant:b"], [b"\xff"]):
        assert caller_of_uris(uris) is None
    assert caller_of_uris(["kvstore:tenant:a", "kvstore:tenant:a"]) == Caller("a")


def test_a_certificate_of_two_nodes_is_neither() -> None:
    one, other = "kvstore:node:" + "1" * 32, "kvstore:node:" + "2" * 32
    assert node_of_uris([one.encode(), "kvstore:tenant:a"]) == node_of_uris([one, one]) == bytes.fromhex("1" * 32)
    for uris in ([], [one, other], [other.encode(), one], [one, other, "kvstore:operator"], [one[:-1]], [one + "1"]):
        assert node_of_uris(uris) is None, uris


def test_whom_the_ca_did_not_sign_sees_a_connection_that_ends(
    running: RunningNetwork, issuer: Issuer, tmp_path: Path
) -> None:
    other = Issuer(tmp_path / "other")
    strangers = {
        "another CA's": other.credentials("stranger", "URI:kvstore:tenant:default", ca=issuer.ca),
        "none": grpc.ssl_channel_credentials(issuer.ca.read_bytes()),
        "expired": issuer.credentials("expired", "URI:kvstore:tenant:default", days=0),
        "of a server that is not this one": other.credentials("reader", "URI:kvstore:tenant:default"),
    }
    for what, credentials in strangers.items():
        code, _ = refused(running.caller(None, credentials=credentials).namespaces)
        assert code is CODE.UNAVAILABLE, what
    assert refused(running.caller("default-token-0123456789abcdef").namespaces)[0] is CODE.UNAVAILABLE  # without TLS


def test_certificates_are_exchanged_without_a_lost_call(
    running: RunningNetwork, sidecar: Sidecar, issuer: Issuer, tmp_path: Path
) -> None:
    """First a half-written one, then a new CA for both sides: those with old and those with new certificates are served
    meanwhile, and only the latter are let in anew in the end."""
    second = Issuer(tmp_path / "second")
    certificate, key = issuer.folder / "server.pem", issuer.folder / "server.key"
    both = issuer.ca.read_bytes() + second.ca.read_bytes()
    (tmp_path / "both.pem").write_bytes(both)
    old = issuer.credentials("old", "URI:kvstore:tenant:default", ca=tmp_path / "both.pem")
    new = second.credentials("new", "URI:kvstore:tenant:default", ca=tmp_path / "both.pem")
    caller, lost, calls, ends = running.caller(None, credentials=old), [], [0], threading.Event()
    (space,) = caller.namespaces()

    def call_on() -> None:
        while not ends.is_set():
            anew = calls[0] % 5 == 0 and not ends.is_set()
            who = running.caller(None, credentials=new if trusts_new.is_set() else old) if anew else caller
            try:
                assert who.match(space.id, token_ids=ids(640)).blocks == 10
                calls[0] += 1
            except grpc.RpcError as error:
                lost.append(error)
            if anew:
                who.close()

    trusts_new = threading.Event()
    thread = threading.Thread(target=call_on)
    thread.start()
    try:
        whole = certificate.read_bytes()
        for damaged in (whole[: len(whole) // 2], b"", b"-----BEGIN CERTIFICATE-----\nnot one\n", key.read_bytes()):
            certificate.write_bytes(damaged)
            _after(calls, 20)
        fresh = second.server("fresh")
        issuer.ca.write_bytes(both)
        certificate.write_bytes(fresh[0].read_bytes())  # the key is the old one's for a moment
        _after(calls, 5)
        key.write_bytes(fresh[1].read_bytes())

        def is_let_in(credentials: object) -> bool:
            try:
                stranger = running.caller(None, credentials=credentials)
                found = bool(stranger.namespaces())
                stranger.close()
                return found
            except grpc.RpcError as error:
                assert error.code() is CODE.UNAVAILABLE
                return False

        wait_until(lambda: is_let_in(new))
        trusts_new.set()
        _after(calls, 20)
        issuer.ca.write_bytes(second.ca.read_bytes())
        wait_until(lambda: not is_let_in(old))
        assert is_let_in(new)
        _after(calls, 20)
    finally:
        ends.set()
        thread.join()
    assert not lost and calls[0] >= 100, (len(lost), lost[:1])


def _after(calls: list[int], more: int) -> None:
    wanted = calls[0] + more
    wait_until(lambda: calls[0] >= wanted)


def test_a_damaged_certificate_is_said_at_the_start(sidecar: Sidecar, tmp_path: Path) -> None:
    issuer = Issuer(tmp_path / "ca")
    certificate, key = issuer.server("broken")
    other_key = issuer.issue("other", "DNS:x")[1]
    flags = beside(sidecar.path.parent, None)
    given = ["--certificate", str(certificate), "--client-ca", str(issuer.ca), "--key"]
    assert "cannot be used together" in fails(*flags, *given, str(other_key))
    assert "cannot be used together" in fails(*flags, *given, str(certificate))
    os.truncate(key, 50)
    assert "cannot be used together" in fails(*flags, *given, str(key))
