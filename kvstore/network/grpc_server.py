"""The gRPC server: callers' rights, deadlines and concurrency; the only file here that knows grpc.

    headers > credential, right, deadline > a lane of the caller's > the message > the service > the answer

A call is refused by its headers, without waiting and without a thread. Calls are unary: a stream would hold a thread
for its life. If reflection is served, its stream does so for some seconds.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import unquote

import grpc
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from kvstore.block.errors import BadInput, StoreError
from kvstore.client.framing import TimedOut
from kvstore.edge.tokens import Tokens
from kvstore.edge.watch import StatusWatch
from kvstore.listeners.places import Place, TakenPlaces
from kvstore.network.credentials import Rotated, caller_of_uris, node_of_uris
from kvstore.network.lanes import AtOnce, CallerLanes, Delayed, Lane
from kvstore.network.links import CallTime, SidecarBusy, TenantLink
from kvstore.network.services import AdminService, DoorCall, Scorer, ScoreService, StoreService
from kvstore.protocol.words import printable
from kvstore.wire.admin_pb2_grpc import add_AdminServicer_to_server
from kvstore.wire.peer_pb2_grpc import add_PeerServicer_to_server
from kvstore.wire.score_pb2_grpc import add_ScoreServicer_to_server
from kvstore.wire.store_pb2_grpc import add_StoreServicer_to_server
from tiering.clock import Clock

KEPT = 512
"""A quarter of what grpc lets in: the others are for those that come between two looks."""
MOST_NAMED = 4096

Peer = tuple[str, int]


class GrpcCallers:
    """Who is connected to gRPC. grpc lets in what comes up to a bound of its own, and ends none of it for a newcomer:
    as many clients that say nothing would keep all others out.

    So the process looks at its own sockets at that port. A connection is a stranger's until a call on it had a
    credential; beyond `KEPT` the rule of `kvstore.listeners.places` says which are shut down. `introduce` is for grpc's
    threads, `make_room` for one of the program's own.
    """

    def __init__(self) -> None:
        self._places = TakenPlaces(KEPT)
        self._by_peer: dict[Peer, Place] = {}
        self._leaving: list[Peer] = []
        self._named: dict[Peer, Hashable] = {}  # the last ones, also of connections not looked at yet

    def introduce(self, peer: str, caller: Hashable) -> None:
        """A call with a credential came. peer: as grpc writes it, `ipv4:127.0.0.1:5000`, `ipv6:%5B::1%5D:5000`."""
        host, _, port = unquote(peer).partition(":")[2].rpartition(":")
        if not port.isdigit():  # a UNIX socket's
            return
        at = host.strip("[]"), int(port)
        if at not in self._named and len(self._named) >= MOST_NAMED:
            with suppress(StopIteration, KeyError, RuntimeError):  # another thread's turn
                del self._named[next(iter(self._named))]
        self._named[at] = caller

    def make_room(self, socks: Collection[socket.socket]) -> bool:
        """Look at the connections that are there; returns whether there are many, so that the next look is due soon.
        socks: duplicates, closed here."""
        there: dict[Peer, socket.socket] = {}
        for sock in socks:
            with suppress(OSError):  # it listens, or its client is gone
                host, port = sock.getpeername()[:2]
                there[str(host).removeprefix("::ffff:"), int(port)] = sock
        for at in self._by_peer.keys() - there.keys():
            self._places.leave(self._by_peer.pop(at))
            self._named.pop(at, None)
        self._leaving.clear()
        for at in there:
            if at not in self._by_peer and self._places.make_room():
                self._by_peer[at] = Place(partial(self._leaving.append, at))
                self._places.take(self._by_peer[at])
            if at in self._by_peer:
                self._by_peer[at].caller = self._named.get(at)
            else:
                self._leaving.append(at)
        for at in self._leaving:
            self._by_peer.pop(at, None)
            with suppress(OSError):
                there[at].shutdown(socket.SHUT_RDWR)
        for sock in socks:
            sock.close()
        return 2 * len(there) > KEPT


def own_sockets_at(port: int) -> list[socket.socket]:
    """Duplicates of this process's sockets at a port, for the caller to close."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                sock = socket.socket(fileno=os.dup(int(name)))
                if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.getsockname()[1] == port:
                    found.append(sock)
                else:
                    sock.close()
        except OSError:  # closed meanwhile, or no descriptor is left
            pass
    return found


MOST_DEADLINE_SECONDS, ROUNDED_SECONDS = 3600.0, 180.0
"""Clients round deadlines up, and may repeat an earlier deadline that was slightly longer."""
MOST_TEXT = 1000
MOST_CONNECTIONS = 4 * KEPT
OPTIONS = [
    ("grpc.so_reuseport", 0),  # a second server gets an error for the port, instead of sharing its connections
    ("grpc.max_receive_message_length", 4 << 20),
    (
        "grpc.compression_enabled_algorithms_bitset",
        1,
    ),  # no compression: 4 MiB of zeros, packed, would be 4 GiB before they are counted
    ("grpc.max_metadata_size", 16 << 10),
    ("grpc.absolute_max_metadata_size", 16 << 10),
    ("grpc.max_concurrent_streams", 128),
    ("grpc.http.overload_protection", 0),  # it refuses streams too soon after others have ended; the bound stays
    ("grpc.max_allowed_incoming_connections", MOST_CONNECTIONS),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 20_000),
    ("grpc.max_connection_age_ms", 3_600_000),
    ("grpc.enable_http_proxy", 0),
]
STORE, ADMIN, SCORE, HEALTH = "kvstore.v1.Store", "kvstore.v1.Admin", "kvstore.v1.Score", "grpc.health.v1.Health"
SERVICES = (STORE, ADMIN, SCORE)
PEER = "kvstore.v1.Peer"
PULL_THREADS, ASK_THREADS, MOST_OF_PEERS = 8, 4, 128
"""For all other nodes together: pulls, which may wait for slower tiers; other queries, answered at once; and the most
calls."""
REFLECTIONS = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")
"""Both versions have the same messages."""
FLOODS = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAUTHENTICATED)
REFUSED_SECONDS, MOST_REFUSED = 0.5, 4096
"""Refusals with these codes are delayed by this time, up to so many at once: a client that retries immediately takes
others' time."""
LONG = ("Drop", "Warm", "DropAny")
Answers = Callable[[Iterator[Any], Any], Iterable[Any]]
"""The answers to a stream's messages, one to one."""
_Send = Callable[[Any], None]

_log = logging.getLogger(__name__)


class Refused(Exception):
    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code


class GrpcDoor:
    """Bind it, start it, close it."""

    def __init__(
        self,
        links: Mapping[str, TenantLink],
        watch: StatusWatch,
        tokens: Rotated[Tokens] | None,
        lanes: CallerLanes,
        clock: Clock,
        scorer: Scorer,
    ) -> None:
        """tokens: None if callers have certificates."""
        self._links, self._watch, self._tokens = links, watch, tokens
        self._lanes, self._clock = lanes, clock
        self.callers = GrpcCallers()
        self._is_draining = self._has_started = False
        self._has_node_certificates = False
        self._peer_lanes: dict[bool, Lane] = {}  # by whether it is for pulls
        self._refusals = Delayed(REFUSED_SECONDS, MOST_REFUSED, clock)
        self._health_lane = Lane("health", 16, 256, clock, room_seconds=0.0)
        self._server = grpc.server(
            AtOnce(1),  # `begin` does not block
            interceptors=[_Entrance(self)],
            options=OPTIONS,
            maximum_concurrent_rpcs=256,
        )
        add_StoreServicer_to_server(StoreService(), self._server)
        add_ScoreServicer_to_server(ScoreService(scorer, watch), self._server)
        add_AdminServicer_to_server(AdminService(watch, links), self._server)
        check = grpc.unary_unary_rpc_method_handler(
            self._check, health_pb2.HealthCheckRequest.FromString, health_pb2.HealthCheckResponse.SerializeToString
        )
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(HEALTH, {"Check": check}),))

    def reflect(self) -> None:
        """Serve reflection, by which callers without the .proto files ask for services and their messages; before
        `start`."""
        answers = reflection.ReflectionServicer([*SERVICES, HEALTH, reflection.SERVICE_NAME]).ServerReflectionInfo
        parse = reflection_pb2.ServerReflectionRequest.FromString
        pack = reflection_pb2.ServerReflectionResponse.SerializeToString
        methods = {"ServerReflectionInfo": grpc.stream_stream_rpc_method_handler(answers, parse, pack)}
        handlers = [grpc.method_handlers_generic_handler(name, methods) for name in REFLECTIONS]
        self._server.add_generic_rpc_handlers(handlers)

    def serve_peers(self, service: Any, *, has_certificates: bool) -> None:
        """Serve other nodes; before `start`. has_certificates: these identify them; else any process is let in."""
        self._has_node_certificates = has_certificates
        self._peer_lanes = {
            False: Lane("peers", ASK_THREADS, MOST_OF_PEERS, self._clock),
            True: Lane("pulls", PULL_THREADS, MOST_OF_PEERS, self._clock),
        }
        add_PeerServicer_to_server(service, self._server)

    def bind(self, address: str, certificates: Callable[[], Any] | None = None) -> int:
        """Listen there; returns the port. certificates: the present `certificate_configuration`, for callers with
        certificates. Raises `BadInput`."""
        try:
            if certificates is None:
                return int(self._server.add_insecure_port(address))
            credentials = grpc.dynamic_ssl_server_credentials(
                certificates(), certificates, require_client_authentication=True
            )
            return int(self._server.add_secure_port(address, credentials))
        except RuntimeError:
            raise BadInput(
                f"{address} cannot be listened on; is it another process's, or no address of this host? give another "
                "--listen (network.listen)"
            ) from None

    def start(self) -> None:
        self._has_started = True
        self._server.start()

    def give_up_late(self) -> None:
        """Cancel calls that have waited for their client too long. Call it every second."""
        for lane in self._all_lanes():
            lane.give_up_late()

    def close(self, seconds: float) -> None:
        """Accept no more calls, which health reports from now on, and end the running ones after this time."""
        self._is_draining = True
        self._refusals.close()
        if not self._has_started:  # else its port would stay taken
            self._server.start()
        self._server.stop(seconds).wait(seconds + 1)
        for lane in self._all_lanes():
            lane.close()

    def _all_lanes(self) -> list[Lane]:
        return [self._health_lane, *self._peer_lanes.values(), *self._lanes.all()]

    # A call --------------------------------------------------------------------------------------------------------

    def begin(self, method: str, behaviour: Any, requests: Iterator[Any], context: Any, send: _Send) -> None:
        """Admit a call, or refuse it; does not block."""
        service, _, name = method.lstrip("/").partition("/")
        try:
            call: object = None
            if service == HEALTH:
                lane = self._health_lane
            elif service == PEER:
                call, lane = self._peer_call(context), self._peer_lanes[name in ("OpenPull", "Offer")]
            else:
                call = self._call(service, context)
                lane = self._lanes.of(call.caller, name in LONG)
            serve = self._reflect if service in REFLECTIONS else self._serve
            if lane.submit(lambda: serve(lane, behaviour, requests, context, send, call)) is None:
                raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls are in flight; ask again later")
        except Refused as refused:
            code, text = refused.code, str(refused)
            if code in FLOODS and context.time_remaining() > 2 * REFUSED_SECONDS:
                self._refusals.do(lambda: _end(context, send, code, text))
            else:
                _end(context, send, code, text)

    def _call(self, service: str, context: Any) -> DoorCall:
        if self._tokens is None:
            caller = caller_of_uris(_uris(context))
        else:
            given = [value for key, value in context.invocation_metadata() if key == "authorization"]
            caller = self._tokens.now().bearer(given[0]) if len(given) == 1 else None
        if caller is None:
            raise Refused(grpc.StatusCode.UNAUTHENTICATED, "unknown credential")
        self.callers.introduce(context.peer(), caller)
        is_operator = caller.tenant is None
        if is_operator != (service == ADMIN) and service not in REFLECTIONS:
            whose = "a tenant's" if is_operator else "the operator's"
            raise Refused(grpc.StatusCode.PERMISSION_DENIED, f"{service} needs {whose} credential")
        link = self._links.get(caller.tenant) if caller.tenant is not None else None
        if link is None and not is_operator:
            text = f"tenant {printable(caller.tenant or '')[:64]!r} has no socket here"
            raise Refused(grpc.StatusCode.PERMISSION_DENIED, text)
        return DoorCall(caller, self._time(context), link)

    def _peer_call(self, context: Any) -> tuple[bytes, Callable[[], float]]:
        node = node_of_uris(_uris(context)) if self._has_node_certificates else b""
        if node is None:
            raise Refused(grpc.StatusCode.UNAUTHENTICATED, f"{PEER} needs the certificate of a node")
        self.callers.introduce(context.peer(), node)
        return node, self._time(context).left

    def _time(self, context: Any) -> CallTime:
        left = context.time_remaining()  # without a deadline it is 9.2e18, and never None
        if left is None or left > MOST_DEADLINE_SECONDS + ROUNDED_SECONDS:
            text = f"the call has no deadline; give one of at most {MOST_DEADLINE_SECONDS:.0f} s"
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, text)
        return CallTime(self._clock, self._clock.monotonic_seconds() + left)

    def _serve(
        self, lane: Lane, behaviour: Any, requests: Iterator[Any], context: Any, send: _Send, call: object
    ) -> None:
        if not context.is_active():
            return
        try:
            with lane.waiting(context.cancel):
                request = next(requests, None)
        except grpc.RpcError:  # the message is too long, malformed, or never came: grpc has reported that
            return
        if request is None:
            _end(context, send, grpc.StatusCode.INVALID_ARGUMENT, "a call without a message")
            return
        try:
            answer = behaviour(request, call)
        except Exception as error:
            code, text = _status_of(error)
            if code is grpc.StatusCode.INTERNAL:
                _log.exception("a call failed")
            _end(context, send, code, text)
            return
        with lane.waiting(context.cancel):
            send(answer)
            send(None)

    def _reflect(
        self, lane: Lane, answers: Answers, requests: Iterator[Any], context: Any, send: _Send, call: object
    ) -> None:
        has_ended = False
        try:
            with lane.waiting(context.cancel):
                for answer in answers(requests, context):
                    send(answer)
                send(None)
            has_ended = True
        except grpc.RpcError:  # cancelled, or a malformed message: grpc has reported that
            has_ended = True
        finally:
            if not has_ended:
                _end(context, send, grpc.StatusCode.INTERNAL, "a fault of the server")

    def _check(self, request: Any, call: None) -> Any:
        if request.service not in ("", *SERVICES):
            raise Refused(grpc.StatusCode.NOT_FOUND, "no such service")
        serves = self._watch.is_ready and not self._is_draining
        kinds = health_pb2.HealthCheckResponse
        return kinds(status=kinds.SERVING if serves else kinds.NOT_SERVING)


class _Entrance(grpc.ServerInterceptor):
    """Routes each unary method to `GrpcDoor.begin`, and no other."""

    def __init__(self, door: GrpcDoor) -> None:
        self._door = door

    def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = continuation(details)
        behaviour = handler and (handler.unary_unary or handler.stream_stream)
        if behaviour is None:
            return None  # UNIMPLEMENTED

        def begin(requests: Iterator[Any], context: Any, send: _Send) -> None:
            self._door.begin(details.method, behaviour, requests, context, send)

        # grpc's way to end a call from another thread; on the wire a unary call equals a stream of one message.
        begin.experimental_non_blocking = True  # type: ignore[attr-defined]
        return grpc.stream_stream_rpc_method_handler(begin, handler.request_deserializer, handler.response_serializer)


def _uris(context: Any) -> Sequence[bytes]:
    """Of a caller's certificate."""
    found: Sequence[bytes] = context.auth_context().get("peer_uri", ())
    return found


def certificate_configuration(contents: list[bytes]) -> Any:
    """From a certificate, its key and the CA of clients."""
    certificate, key, client_ca = contents
    return grpc.ssl_server_certificate_configuration([(key, certificate)], client_ca)


def _end(context: Any, send: _Send, code: grpc.StatusCode, text: str) -> None:
    context.set_code(code)
    context.set_details(" ".join(text.split())[:MOST_TEXT])
    send(None)


def _status_of(error: Exception) -> tuple[grpc.StatusCode, str]:
    match error:
        case Refused():
            return error.code, str(error)
        case BadInput():
            return grpc.StatusCode.INVALID_ARGUMENT, str(error)
        case TimedOut():
            return grpc.StatusCode.DEADLINE_EXCEEDED, "the call's deadline passed first"
        case SidecarBusy():
            return grpc.StatusCode.RESOURCE_EXHAUSTED, f"{error}; ask again later"
        case StoreError():
            return grpc.StatusCode.UNAVAILABLE, str(error)
        case _:
            return grpc.StatusCode.INTERNAL, "a fault of the server; it is in its log"
