"""Fingerprints in every handshake of a client and a sidecar."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from kvstore.block.account import MissReason
from kvstore.block.identity import Identity
from kvstore.config import KeysOptions
from kvstore.keys import pool_keys
from kvstore.keys.pool_keys import SecretDirectory
from kvstore.protocol import messages as m
from service.sidecar import Sidecar
from torture.peer import Peer
from waiting import wait_until
from workbench import MODEL, ids, random_pages, small_layout

LAYOUT = small_layout()


def pool(path: Path) -> KeysOptions:
    pool_keys.init(SecretDirectory(path), ["default"], secrets.token_bytes)
    return KeysOptions(str(path))


def test_a_welcome_says_whose_keys_and_which_node(tmp_path: Path) -> None:
    with Sidecar(tmp_path, keys=pool(tmp_path / "pool")) as sidecar:
        keys = sidecar.store.tenant_keys("default")
        identity = Identity.of(keys, sidecar.core.node)
        with sidecar.client() as client:
            client.namespace(model=MODEL, layout=LAYOUT)
            welcome = client._door._run.wire.welcome  # type: ignore[union-attr]
            assert welcome.fingerprint == identity.key_id == keys.fingerprint
            assert (welcome.node, welcome.incarnation) == (identity.node, identity.incarnation)
            assert identity.node != bytes(16) and identity.incarnation != bytes(8)
            assert [one.fingerprint for one in sidecar.sessions.callers()] == [b""]


@pytest.mark.parametrize("fingerprint", [b"x", b"other-id", bytes(8), b""])  # the last as earlier versions say it
def test_a_client_with_other_keys_is_known_until_it_opens_its_namespaces_anew(
    tmp_path: Path, fingerprint: bytes
) -> None:
    with Sidecar(tmp_path) as sidecar:
        raw = Peer(str(sidecar.path))
        welcome = raw.ask(m.Hello(1, 2, "t", b"", fingerprint))
        assert (
            isinstance(welcome, m.Welcome) and welcome.fingerprint == sidecar.store.tenant_keys("default").fingerprint
        )
        (caller,) = sidecar.sessions.callers()
        assert caller.fingerprint == fingerprint
        with sidecar.client() as client:
            handle = client.namespace(model=MODEL, layout=LAYOUT)
            request = client._door._opened[0].request
            assert handle.put(ids(64), random_pages(LAYOUT, 1)).stored == 1
        assert isinstance(raw.ask(request), m.Granted)
        assert caller.fingerprint == b"", "it has the right keys now"
        raw.close()
        wait_until(lambda: not sidecar.sessions.callers())


def test_a_fingerprint_that_is_too_long_ends_that_connection_alone(tmp_path: Path) -> None:
    with Sidecar(tmp_path) as sidecar, sidecar.client() as client:
        handle = client.namespace(model=MODEL, layout=LAYOUT)
        raw = Peer(str(sidecar.path))
        answer = raw.ask(m.Hello(1, 2, "t", b"", b"x" * 9))
        assert isinstance(answer, m.Failed) and answer.fault is m.RequestFault.MALFORMED
        assert handle.put(ids(64), random_pages(LAYOUT, 1)).stored == 1


def test_a_sidecar_with_other_keys_is_a_miss_that_names_both(tmp_path: Path) -> None:
    with Sidecar(tmp_path, keys=pool(tmp_path / "one")) as sidecar:
        client = sidecar.client()
        handle = client.namespace(model=MODEL, layout=LAYOUT)
        assert handle.put(ids(64), random_pages(LAYOUT, 1)).stored == 1
        mine = sidecar.store.tenant_keys("default").fingerprint.hex()
    other = tmp_path / "other"
    other.mkdir()
    with Sidecar(other, keys=pool(tmp_path / "two")) as sidecar:
        (tmp_path / "kvstore.sock").unlink(missing_ok=True)
        (tmp_path / "kvstore.sock").symlink_to(sidecar.path)
        theirs = sidecar.store.tenant_keys("default").fingerprint.hex()
        wait_until(lambda: handle.match(ids(64)).reason is MissReason.KEY_MISMATCH)
        match, done = handle.match(ids(64)), handle.put(ids(64), random_pages(LAYOUT, 1))
        assert match.reason is done.reason is MissReason.KEY_MISMATCH
        assert mine in match.detail and theirs in match.detail and mine in done.detail and theirs in done.detail
        assert [one.fingerprint.hex() for one in sidecar.sessions.callers()] == [mine]
        anew = client.namespace(model=MODEL, layout=LAYOUT)
        assert anew.put(ids(64), random_pages(LAYOUT, 1)).stored == 1
        assert handle.match(ids(64)).reason is MissReason.KEY_MISMATCH, "its keys are the old ones"
        assert [one.fingerprint for one in sidecar.sessions.callers()] == [b""]
        client.close()
