"""Who may use a socket, by user id: those who are named, and nobody where nobody is."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest

from kvstore.protocol import messages as m
from service.sidecar import Sidecar
from service.test_serve import serving
from torture.peer import Peer

ME, OTHER = os.getuid(), os.getuid() + 1


def answer(path: Path) -> m.Answer:
    """To a hello."""
    with closing(Peer(str(path))) as peer:
        return peer.ask(m.Hello(1, 1, "test"))


@pytest.mark.parametrize(
    ("users", "is_welcome"),
    [(None, True), ([], False), ([OTHER], False), ([ME], True), ([OTHER, ME], True), (frozenset(), False)],
)
def test_those_who_are_named_come_in_and_nobody_else(
    sidecar: Sidecar, tmp_path: Path, users: list[int] | None, is_welcome: bool
) -> None:
    path = tmp_path / "other.sock"
    sidecar.door.listen(path, sidecar.store.tenant_keys("other"), users=users)
    said = answer(path)
    if is_welcome:
        assert isinstance(said, m.Welcome)
    else:
        assert isinstance(said, m.Failed) and said.fault is m.RequestFault.BAD_INPUT
        assert f"user {ME} may not use this socket" in said.text
    assert isinstance(answer(sidecar.path), m.Welcome), "the other socket's users are its own"


@pytest.mark.slow
def test_a_sidecar_that_is_told_to_let_nobody_in_does_not(tmp_path: Path) -> None:
    """Through the settings: an empty list is not the same as none."""
    config = tmp_path / "kv.toml"
    config.write_text(f"[door]\nusers = []\n[tenants.a]\nsocket = '{tmp_path / 'a.sock'}'\nusers = [{ME}]\n")
    with serving(tmp_path, "--config", str(config)) as (_, said):
        default, other = map(Path, said["serving"])
        assert other.name == "a.sock" and isinstance(answer(other), m.Welcome)
        said_to_us = answer(default)
        assert isinstance(said_to_us, m.Failed) and "may not use this socket" in said_to_us.text
