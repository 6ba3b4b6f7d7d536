"""The network process beside a sidecar, as a process; its callers with tokens and with certificates of a CA."""

from __future__ import annotations

import select
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

grpc = pytest.importorskip("grpc", reason="grpcio is not installed (extra: server)")
pytest.importorskip("grpc_health", reason="grpcio-health-checking is not installed (extra: server)")

from grpc_health.v1 import health_pb2, health_pb2_grpc  # noqa: E402

from kvstore.wire import admin_pb2_grpc, score_pb2_grpc, store_pb2, store_pb2_grpc  # noqa: E402
from network.tokens import ENVIRONMENT, OPERATOR_TOKEN, token_of  # noqa: E402
from programs import KVSTORE, refused_start, serving_program  # noqa: E402

CLIENT_OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),
]
SOON = 60.0
"""A deadline that a busy machine keeps."""


def bearer(token: str) -> list[tuple[str, str]]:
    """As metadata."""
    return [("authorization", f"Bearer {token}")]


def token_file(directory: Path, tenants: Sequence[str] = ("default",)) -> Path:
    path = directory / "tokens"
    path.write_text("\n".join([OPERATOR_TOKEN, *(f"{name} {token_of(name)}" for name in tenants)]) + "\n")
    return path


class Stubs:
    """A caller: its channel, and the services with its credential."""

    def __init__(self, target: str, token: str | None = None, credentials: Any = None) -> None:
        self.channel = (
            grpc.secure_channel(target, credentials, CLIENT_OPTIONS)
            if credentials is not None
            else grpc.insecure_channel(target, CLIENT_OPTIONS)
        )
        self.metadata = bearer(token) if token is not None else []
        self.store = store_pb2_grpc.StoreStub(self.channel)
        self.score = score_pb2_grpc.ScoreStub(self.channel)
        self.admin = admin_pb2_grpc.AdminStub(self.channel)
        self.health = health_pb2_grpc.HealthStub(self.channel)

    def ask(self, method: Any, request: Any, timeout: float | None = SOON) -> Any:
        return method(request, timeout=timeout, metadata=self.metadata)

    def match(self, namespace: str, timeout: float | None = SOON, **prompt: Any) -> store_pb2.MatchResponse:
        request = store_pb2.MatchRequest(namespace=namespace, prompt=store_pb2.Prompt(**prompt))
        return self.ask(self.store.Match, request, timeout)

    def namespaces(self, timeout: float | None = SOON) -> list[store_pb2.Namespace]:
        return list(self.ask(self.store.Namespaces, store_pb2.NamespacesRequest(), timeout).namespaces)

    def is_serving(self, service: str = "") -> bool:
        answer = self.health.Check(health_pb2.HealthCheckRequest(service=service), timeout=SOON)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def close(self) -> None:
        self.channel.close()


def refused(call: Any, *given: Any, **named: Any) -> tuple[Any, str]:
    """The code and the words of a call that fails."""
    with pytest.raises(grpc.RpcError) as error:
        call(*given, **named)
    return error.value.code(), error.value.details() or ""


@dataclass
class RunningNetwork:
    target: str
    http_port: int | None
    process: subprocess.Popen[str]

    def caller(self, token: str | None, credentials: Any = None) -> Stubs:
        return Stubs(self.target, token, credentials)

    def of_tenant(self, tenant: str = "default") -> Stubs:
        return self.caller(token_of(tenant))

    def operator(self) -> Stubs:
        return self.caller(OPERATOR_TOKEN)


def ended_by_peer(socks: Sequence[socket.socket]) -> int:
    """How many of these connections the server has ended."""
    poll = select.poll()
    for one in socks:
        poll.register(one, select.POLLRDHUP)
    return len(poll.poll(0))


@contextmanager
def network(*flags: str) -> Iterator[RunningNetwork]:
    """With these flags of `kvstore network`."""
    with serving_program([*KVSTORE, "network", "--json", *flags], ENVIRONMENT) as (process, said):
        yield RunningNetwork(said["network"], said["http_port"], process)


def fails(*flags: str) -> str:
    """The line with which it does not start."""
    return refused_start("network", *flags, env=ENVIRONMENT)


def beside(directory: Path, tokens: Path | None, listen: str = "127.0.0.1:0", **sockets: Path) -> list[str]:
    """Flags for a sidecar of `Sidecar` in that directory."""
    named = sockets or {"default": directory / "kvstore.sock"}
    flags = [f"--socket={name}={path}" for name, path in named.items()]
    flags += ["--observe-socket", str(directory / "observe.sock"), "--listen", listen]
    return [*flags, *(["--token-file", str(tokens)] if tokens is not None else [])]


# Certificates ---------------------------------------------------------------------------------------------------------


def openssl(*arguments: str, cwd: Path) -> None:
    done = subprocess.run(["openssl", *arguments], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@dataclass
class Issuer:
    """A CA in a folder of its own, by the openssl command."""

    folder: Path

    def __post_init__(self) -> None:
        self.folder.mkdir()
        openssl(*"req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2".split(), "-subj", "/CN=ca",
                "-keyout", "ca.key", "-out", "ca.pem", cwd=self.folder)  # fmt: skip

    @property
    def ca(self) -> Path:
        return self.folder / "ca.pem"

    def issue(self, name: str, names: str, days: int = 2) -> tuple[Path, Path]:
        """A certificate and its key. names: subject alternative names, as openssl has them."""
        (self.folder / f"{name}.cnf").write_text(f"subjectAltName={names}\n")
        openssl(*"req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes".split(), "-subj", f"/CN={name}",
                "-keyout", f"{name}.key", "-out", f"{name}.csr", cwd=self.folder)  # fmt: skip
        openssl(*"x509 -req -CA ca.pem -CAkey ca.key -CAcreateserial".split(), "-days", str(days),
                "-in", f"{name}.csr", "-extfile", f"{name}.cnf", "-out", f"{name}.pem", cwd=self.folder)  # fmt: skip
        return self.folder / f"{name}.pem", self.folder / f"{name}.key"

    def server(self, name: str = "server") -> tuple[Path, Path]:
        return self.issue(name, "DNS:localhost,IP:127.0.0.1")

    def credentials(self, name: str, names: str, days: int = 2, ca: Path | None = None) -> Any:
        """What a caller's channel is made with. ca: of the server."""
        certificate, key = self.issue(name, names, days)
        return grpc.ssl_channel_credentials((ca or self.ca).read_bytes(), key.read_bytes(), certificate.read_bytes())


@contextmanager
def certified(directory: Path, issuer: Issuer, *flags: str) -> Iterator[RunningNetwork]:
    """A network process whose callers come with certificates."""
    certificate, key = issuer.server()
    given = ["--certificate", str(certificate), "--key", str(key), "--client-ca", str(issuer.ca)]
    with network(*beside(directory, None), *given, *flags) as running:
        yield running
