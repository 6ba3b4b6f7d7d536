"""Who may read the metrics, and what a token's file may hold."""

from __future__ import annotations

import json
from http import HTTPStatus
from pathlib import Path

import pytest

from kvstore.block.errors import BadInput
from kvstore.metrics.endpoints import HttpAnswer, MetricsAccess, read_token, sidecar_pages
from kvstore.status.tree import Readiness

TOKEN = "0123456789abcdef/+=_"


def asked(access: MetricsAccess, path: str = "/metrics", **headers: str) -> HttpAnswer:
    pages = sidecar_pages(lambda: Readiness.READY, lambda: True, list, lambda: b"page", access)
    return pages[path](headers)


def test_one_tenant_alone_needs_no_token() -> None:
    answer = asked(MetricsAccess(None, is_shared=False))
    assert (answer.status, answer.body) == (HTTPStatus.OK, b"page")
    assert answer.content_type == "text/plain; version=0.0.4; charset=utf-8"


def test_several_tenants_without_a_token_are_told_of_to_no_client() -> None:
    access = MetricsAccess(None, is_shared=True)
    assert access.is_closed
    for headers in ({}, {"authorization": "Bearer "}, {"authorization": f"Bearer {TOKEN}"}):
        answer = asked(access, **headers)
        assert answer.status == HTTPStatus.UNAUTHORIZED
        assert answer.body.count(b"\n") == 1 and b"set http.token_file" in answer.body


@pytest.mark.parametrize("is_shared", [False, True])
def test_with_a_token_only_its_bearer_reads(is_shared: bool) -> None:
    access = MetricsAccess(TOKEN, is_shared=is_shared)
    assert not access.is_closed
    for given in (f"Bearer {TOKEN}", f"bearer  {TOKEN} "):
        assert asked(access, authorization=given).status == HTTPStatus.OK
    wrong = [
        "",
        TOKEN,
        f"Basic {TOKEN}",
        "Bearer",
        "Bearer ",
        f"Bearer {TOKEN[:-1]}",
        f"Bearer {TOKEN}x",
        "Bearer \xff☃",
    ]
    for given in wrong:
        answer = asked(access, authorization=given)
        assert answer.status == HTTPStatus.UNAUTHORIZED, given
        assert answer.body.count(b"\n") == 1 and b"http.token_file" in answer.body and TOKEN.encode() not in answer.body
        assert dict(answer.headers)["WWW-Authenticate"].startswith("Bearer")
    assert asked(access).status == HTTPStatus.UNAUTHORIZED


def test_probes_take_no_token_and_tell_nothing() -> None:
    access = MetricsAccess(TOKEN, is_shared=True)
    assert json.loads(asked(access, "/livez").body) == {"alive": True}
    assert json.loads(asked(access, "/readyz").body) == {"ready": True, "state": "ready"}


@pytest.mark.parametrize("content", [TOKEN, f"\n {TOKEN} \r\n", "x" * 16, "x" * 1024])
def test_a_token_is_what_stands_in_its_file(tmp_path: Path, content: str) -> None:
    file = tmp_path / "token"
    file.write_text(content)
    assert read_token(str(file)) == content.strip()


@pytest.mark.parametrize(
    "content", [b"", b"x" * 15, b"x" * 1025, b"x" * 5000, b"two words of many letters", b"\xff" * 20, b"x" * 16 + b"\0"]
)
def test_what_is_no_token_is_said_at_the_start(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "token"
    file.write_bytes(content)
    with pytest.raises(BadInput, match=r"http\.token_file=.*give a file of 16 to 1024 printable"):
        read_token(str(file))


def test_a_token_that_cannot_be_read_is_said_at_the_start(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(BadInput, match=r"http\.token_file=.* cannot be read: "):
            read_token(str(path))
