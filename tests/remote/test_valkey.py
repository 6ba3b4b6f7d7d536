"""The contract of remote engines, by a real server: over TCP, a UNIX socket and TLS."""

from __future__ import annotations

import random
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from remote.between import proxy, saying
from remote.frames import FRAME_BYTES, frame, halves, is_of, key_of
from tiering.clock import SystemClock
from tiering.errors import TierError
from tiering.remote.driver import RemoteFault, RemoteTimedOut, RemoteUnreachable, WrongSize
from tiering.remote.resp import PIECE_BYTES
from tiering.remote.valkey import RULES, ValkeyAddress, ValkeyEngine
from valkey_server import ValkeyServer, server_of_module, valkey_server
from waiting import together, wait_until

CLOCK = SystemClock()
PATIENT = {"call_seconds": 60.0, "connect_seconds": 60.0}


def slot() -> memoryview:
    return memoryview(bytearray(b"\xee" * FRAME_BYTES))


def on(port: int, **limits: float) -> ValkeyEngine:
    return ValkeyEngine(ValkeyAddress("127.0.0.1", port), CLOCK, **(limits or PATIENT))


def soon(seconds: float) -> float:
    return CLOCK.monotonic_seconds() + seconds


server = server_of_module


class RemoteEngineContract:
    """Of any engine; the server is empty."""

    def test_a_frame_comes_back_as_it_was_written(self, engine: ValkeyEngine) -> None:
        for number in range(3):
            assert engine.write(key_of(number), *halves(number), 0)
        for number in range(3):
            assert engine.read(key_of(number), into := slot())
            assert bytes(into) == frame(number) and is_of(bytes(into), number)

    def test_what_arrives_is_told_as_it_comes(self, engine: ValkeyEngine) -> None:
        """Of a value of several pieces: each time the bytes that are said to be there are, and at last all of them."""
        value = random.Random(7).randbytes(3 * PIECE_BYTES + 1000)
        assert engine.write(key_of(0), value[:100], value[100:], 0)
        into, told = memoryview(bytearray(len(value))), [0]

        def arrived(count: int) -> None:
            assert into[told[-1] : count] == value[told[-1] : count]
            told.append(count)

        assert engine.read(key_of(0), into, arrived=arrived)
        assert told == sorted(told) and told[-1] == len(value)
        assert not engine.read(key_of(1), into, arrived=lambda count: pytest.fail("nothing is there"))

    def test_what_is_not_there_is_a_miss(self, engine: ValkeyEngine) -> None:
        assert not engine.read(key_of(9), slot())
        assert engine.exists([key_of(9)]) == [False] and engine.delete([key_of(9)]) == 0
        assert engine.exists([]) == [] and engine.delete([]) == 0

    def test_a_written_frame_never_changes(self, engine: ValkeyEngine) -> None:
        assert engine.write(key_of(1), *halves(1), 0) and engine.write(key_of(1), *halves(2), 0)
        assert engine.read(key_of(1), into := slot()) and bytes(into) == frame(1)

    def test_what_was_deleted_can_be_written_again(self, engine: ValkeyEngine) -> None:
        engine.write(key_of(1), *halves(2), 0)
        assert engine.delete([key_of(1), key_of(7)]) == 1
        assert engine.write(key_of(1), *halves(1), 0)
        assert engine.read(key_of(1), into := slot()) and bytes(into) == frame(1)

    def test_many_names_are_asked_for_in_order(self, engine: ValkeyEngine) -> None:
        for number in range(0, 1000, 3):
            engine.write(key_of(number), b"", b"-", 0)
        assert engine.exists([key_of(number) for number in range(1000)]) == [n % 3 == 0 for n in range(1000)]
        assert engine.delete([key_of(number) for number in range(1000)]) == 334

    def test_a_value_of_another_size_is_not_read(self, engine: ValkeyEngine) -> None:
        for size in (0, FRAME_BYTES - 1, FRAME_BYTES + 1):
            engine.delete([key_of(1)])
            engine.write(key_of(1), b"", bytes(size), 0)
            with pytest.raises(WrongSize, match=f"{size:,} bytes where {FRAME_BYTES:,}"):
                engine.read(key_of(1), into := slot())
            assert bytes(into) == b"\xee" * FRAME_BYTES
        engine.write(key_of(2), *halves(2), 0)
        assert engine.read(key_of(2), into) and bytes(into) == frame(2), "the value's bytes are in nobody's answer"

    def test_a_frame_leaves_when_its_time_is_over(self, engine: ValkeyEngine) -> None:
        engine.write(key_of(1), *halves(1), 1)
        wait_until(lambda: engine.exists([key_of(1)]) == [False])

    def test_a_deadline_that_is_over_is_a_time_out(self, engine: ValkeyEngine) -> None:
        for call in (
            lambda: engine.read(key_of(1), slot(), soon(-1)),
            lambda: engine.write(key_of(1), *halves(1), 0, soon(-1)),
            lambda: engine.exists([key_of(1)], soon(-1)),
            lambda: engine.delete([key_of(1)], soon(-1)),
        ):
            with pytest.raises((RemoteTimedOut, RemoteUnreachable)):
                call()

    def test_threads_share_it(self, engine: ValkeyEngine) -> None:
        for number in range(8):
            engine.write(key_of(number), *halves(number), 0)

        def read_all(first: int) -> None:
            into = slot()
            for at in range(40):
                number = (first + at) % 8
                assert engine.read(key_of(number), into) and bytes(into) == frame(number)

        together(read_all, 8)

    def test_a_closed_one_says_so(self, engine: ValkeyEngine) -> None:
        engine.exists([key_of(1)])
        engine.close()
        engine.close()
        with pytest.raises(RemoteFault, match="closed"):
            engine.exists([key_of(1)])


class TestTcp(RemoteEngineContract):
    @pytest.fixture
    def engine(self, server: ValkeyServer) -> Iterator[ValkeyEngine]:
        server.empty()
        one = on(server.port)
        yield one
        one.close()


class TestUnixSocket(RemoteEngineContract):
    @pytest.fixture
    def engine(self, server: ValkeyServer) -> Iterator[ValkeyEngine]:
        server.empty()
        one = ValkeyEngine(ValkeyAddress.parse(f"valkey+unix:{server.socket_path}"), CLOCK, **PATIENT)
        yield one
        one.close()


class TestTls(RemoteEngineContract):
    """The server has none: a proxy takes it off."""

    @pytest.fixture(scope="class")
    def certificate(self, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
        return certified(tmp_path_factory.mktemp("tls"))

    @pytest.fixture
    def engine(self, server: ValkeyServer, certificate: tuple[Path, Path]) -> Iterator[ValkeyEngine]:
        server.empty()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        with proxy(server.port, context) as between:
            url = f"rediss://127.0.0.1:{between.port}?ca={certificate[0]}"
            one = ValkeyEngine(ValkeyAddress.parse(url), CLOCK, **PATIENT)
            yield one
            one.close()

    def test_a_server_without_a_certificate_that_is_known_is_refused(
        self, server: ValkeyServer, certificate: tuple[Path, Path], tmp_path: Path
    ) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certified(tmp_path))
        with proxy(server.port, context) as between:
            address = ValkeyAddress("127.0.0.1", between.port, is_tls=True, ca=str(certificate[0]))
            with pytest.raises(RemoteUnreachable, match="CERTIFICATE_VERIFY_FAILED"):
                ValkeyEngine(address, CLOCK, **PATIENT).exists([key_of(1)])
            assert not address.user and str(address).startswith("valkeys://")


def certified(folder: Path) -> tuple[Path, Path]:
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem"]
    subprocess.run([*command.split(), *names], cwd=folder, check=True, capture_output=True)
    return folder / "cert.pem", folder / "key.pem"


# --- connections ---


def test_a_connection_is_kept_and_one_that_is_out_of_step_is_not(server: ValkeyServer) -> None:
    server.empty()
    with proxy(server.port) as between:
        engine = on(between.port)
        for _ in range(5):
            engine.exists([key_of(1)])
        assert between.connections == 1
        with pytest.raises(WrongSize):
            engine.write(key_of(1), b"", b"short", 0)
            engine.read(key_of(1), slot())
        engine.exists([key_of(1)])
        assert between.connections == 2
        engine.close()


def test_more_than_was_asked_for_ends_the_connection(server: ValkeyServer) -> None:
    """What follows an answer would be the next one's."""
    with saying(b":1\r\n:0\r\n") as port:
        engine = on(port)
        assert [engine.exists([key_of(1)]) for _ in range(3)] == [[True]] * 3
        engine.close()


def test_a_server_that_was_restarted_costs_no_call(tmp_path: Path) -> None:
    with valkey_server(tmp_path) as server:
        engine = on(server.port)
        engine.write(key_of(1), *halves(1), 0)
        assert engine.exists([key_of(1)]) == [True]
        server.kill()
        with pytest.raises(RemoteUnreachable, match="refused"):
            engine.exists([key_of(1)])
        server.start()
        assert engine.exists([key_of(1)]) == [False]
        engine.close()


def test_a_full_server_takes_no_frame_and_serves_those_it_has(tmp_path: Path) -> None:
    with valkey_server(tmp_path, ["--maxmemory", "4mb", "--maxmemory-policy", "noeviction"]) as server:
        engine = on(server.port)
        written = [engine.write(key_of(number), *halves(number), 0) for number in range(100)]
        count = written.index(False)
        assert 5 < count < 100
        for number in range(count):
            assert engine.read(key_of(number), into := slot()) and bytes(into) == frame(number)
        engine.close()


def test_a_value_beyond_the_servers_limit_is_a_fault(tmp_path: Path) -> None:
    with valkey_server(tmp_path, ["--proto-max-bulk-len", "1mb"]) as server:
        engine = on(server.port)
        with pytest.raises(RemoteFault):
            engine.write(key_of(1), b"", bytes(2 << 20), 0)
        engine.write(key_of(1), *halves(1), 0)
        assert engine.read(key_of(1), into := slot()) and bytes(into) == frame(1)
        engine.close()


# --- who may ---


def test_the_access_list_suffices_and_gives_no_more(tmp_path: Path) -> None:
    users = tmp_path / "users.acl"
    users.write_text(f"user kvtier on >secret {RULES}\nuser default off\n")
    with valkey_server(tmp_path, ["--aclfile", str(users)]) as server:
        address = ValkeyAddress.parse(f"valkey://kvtier@127.0.0.1:{server.port}")
        engine = ValkeyEngine(address, CLOCK, lambda: b"secret", **PATIENT)
        assert engine.write(key_of(1), *halves(1), 60_000) and engine.exists([key_of(1)]) == [True]
        assert engine.read(key_of(1), into := slot()) and bytes(into) == frame(1)
        assert engine.delete([key_of(1)]) == 1
        with pytest.raises(RemoteFault, match="NOPERM: the user may not do this"):
            engine.exists([b"other:1"])
        engine.close()
        with socket.create_connection(("127.0.0.1", server.port)) as one:
            one.sendall(b"AUTH kvtier secret\r\n")
            assert one.recv(100) == b"+OK\r\n"
            for command in (b"KEYS kvf:*", b"FLUSHALL", b"CONFIG GET *", b"GET other:1", b"SCAN 0", b"ACL LIST"):
                one.sendall(command + b"\r\n")
                assert one.recv(200).startswith(b"-NOPERM"), command


@pytest.mark.parametrize(
    ("user", "password", "said"),
    [
        ("kvtier@", b"wrong", "WRONGPASS: user or password"),
        ("", b"", "NOAUTH: it wants a password"),
        ("", b"secret", "WRONGPASS"),
    ],
)
def test_who_may_not_is_told_what_to_set(user: str, password: bytes, said: str, tmp_path: Path) -> None:
    users = tmp_path / "users.acl"
    users.write_text(f"user kvtier on >secret {RULES}\nuser default off\n")
    with valkey_server(tmp_path, ["--aclfile", str(users)]) as server:
        address = ValkeyAddress.parse(f"valkey://{user}127.0.0.1:{server.port}")
        with pytest.raises(RemoteFault, match=said) as caught:
            ValkeyEngine(address, CLOCK, lambda: password, **PATIENT).exists([key_of(1)])
        assert "secret" not in str(caught.value) and "\n" not in str(caught.value)


def test_a_new_password_is_used_from_the_next_connection_on(tmp_path: Path) -> None:
    words = [b"first"]
    with valkey_server(tmp_path, ["--requirepass", "second"]) as server:
        engine = ValkeyEngine(ValkeyAddress("127.0.0.1", server.port), CLOCK, lambda: words[-1], **PATIENT)
        with pytest.raises(RemoteFault, match="WRONGPASS"):
            engine.exists([key_of(1)])
        words.append(b"second")
        assert engine.exists([key_of(1)]) == [False]
        engine.close()


def test_a_cluster_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        bus = str(probe.getsockname()[1])
    with (
        valkey_server(tmp_path, ["--cluster-enabled", "yes", "--cluster-port", bus]) as server,
        pytest.raises(RemoteFault, match="one of a cluster, whose redirections are not followed"),
    ):
        on(server.port).exists([key_of(1)])


# --- answers that are none ---

LONG = b"+" + b"x" * 5000 + b"\r\n"
STRANGE = {
    "moved": (b"-MOVED 1234 10.0.0.1:6379\r\n", "MOVED: it is one of a cluster"),
    "ask": (b"-ASK 1234 10.0.0.1:6379\r\n", "ASK: it is one of a cluster"),
    "loading": (b"-LOADING kvf:secret\r\n", "LOADING: it is loading"),
    "error": (b"-ERR unknown kvf:secret\r\n", "ERR: it does not know"),
    "lower case": (b"-kvf:secret kvf\r\n", "an error"),
    "huge line": (LONG, "a line of more than 512 bytes"),
    "no number": (b"$x\r\n", "no number"),
    "underscores": (b"$1_0\r\n", "no number"),
    "minus": (b"$-2\r\n", "no number"),
    "many digits": (b"$" + b"9" * 40 + b"\r\n", "no number"),
    "streamed": (b"$?\r\n", "no number"),
    "a list": (b"*1\r\n$1\r\nx\r\n", "kind that was not asked for"),
    "a map": (b"%1\r\n+a\r\n+b\r\n", "kind that was not asked for"),
    "a push": (b">2\r\n+a\r\n+b\r\n", "kind that was not asked for"),
    "a status": (b"+OK\r\n", "kind that was not asked for"),
    "a boolean": (b"#t\r\n", "kind that was not asked for"),
    "an error of RESP3": (b"!21\r\nSYNTAX invalid syntax\r\n", "an error|answered"),
    "nothing": (b"\r\n", "kind that was not asked for"),
    "no end": (b"$%d\r\n" % FRAME_BYTES + bytes(FRAME_BYTES) + b"xx", "does not end"),
}


@pytest.mark.parametrize("what", STRANGE)
def test_a_strange_answer_is_a_fault_in_one_line(what: str) -> None:
    answer, said = STRANGE[what]
    with saying(answer) as port:
        engine = on(port)
        for _ in range(2):
            with pytest.raises(RemoteFault, match=said) as caught:
                engine.read(key_of(1), slot())
            assert "secret" not in str(caught.value) and "\n" not in str(caught.value)
        engine.close()


def test_a_null_of_resp_3_is_a_miss() -> None:
    with saying(b"_\r\n") as port:
        assert not on(port).read(key_of(1), slot())


@pytest.mark.parametrize(
    "greeting",
    [
        b"+OK\r\n",
        b"*100000000\r\n",
        b"*1\r\n" * 50,
        b"*2\r\n+a\r\n$100000000\r\n",
        b"*1024\r\n" + b"*0\r\n" * 1024,
        b"*-1\r\n",
    ],
)
def test_a_greeting_that_is_none_is_a_fault(greeting: bytes) -> None:
    with saying(b"_\r\n", greeting) as port, pytest.raises(RemoteFault):
        on(port).read(key_of(1), slot())


def test_a_greeting_of_resp_3_with_modules_is_understood() -> None:
    greeting = b"%2\r\n+mode\r\n+standalone\r\n+modules\r\n*1\r\n%2\r\n+name\r\n+x\r\n+args\r\n~1\r\n:7\r\n"
    with saying(b"_\r\n", greeting) as port:
        assert not on(port).read(key_of(1), slot())


@pytest.mark.parametrize("verb", ["exists", "delete", "write"])
@pytest.mark.parametrize("answer", [b":2\r\n", b":-1\r\n", b"+QUEUED\r\n", b"*0\r\n", b"$3\r\nabc\r\n"])
def test_an_answer_of_another_command_is_a_fault(verb: str, answer: bytes) -> None:
    with saying(answer) as port, pytest.raises(RemoteFault):
        engine = on(port)
        call = {"exists": lambda: engine.exists([key_of(1)]), "delete": lambda: engine.delete([key_of(1)])}
        call.get(verb, lambda: engine.write(key_of(1), *halves(1), 0))()


# --- deadlines ---


def test_a_late_answer_is_not_the_next_ones(tmp_path: Path) -> None:
    with valkey_server(tmp_path) as server:
        engine = on(server.port)
        for number in (1, 2):
            engine.write(key_of(number), *halves(number), 0)
        server.stop()
        with pytest.raises(RemoteTimedOut):
            engine.read(key_of(1), slot(), soon(0.1))
        into = slot()
        asks = threading.Thread(target=lambda: engine.read(key_of(2), into))
        asks.start()
        wait_until(lambda: bool(engine._lent))
        time.sleep(0.05)  # it has asked: nothing tells
        server.go_on()
        asks.join()
        assert bytes(into) == frame(2)
        engine.close()


def test_closing_ends_what_is_under_way(tmp_path: Path) -> None:
    with valkey_server(tmp_path) as server:
        engine = on(server.port)
        engine.exists([key_of(1)])
        server.stop()
        ended = threading.Event()

        def ask() -> None:
            with pytest.raises(TierError):
                engine.exists([key_of(1)])
            ended.set()

        threading.Thread(target=ask).start()
        wait_until(lambda: not engine._idle)
        engine.close()
        assert ended.wait(30)


# --- addresses ---


@pytest.mark.parametrize(
    ("url", "want"),
    [
        ("valkey://10.0.0.1", ValkeyAddress("10.0.0.1")),
        ("redis://kv@cache.example:7000/", ValkeyAddress("cache.example", 7000, user="kv")),
        ("valkeys://[fd00::1]:7000", ValkeyAddress("fd00::1", 7000, is_tls=True)),
        ("rediss://h?ca=/etc/ca.pem", ValkeyAddress("h", is_tls=True, ca="/etc/ca.pem")),
        ("valkey+unix:/run/valkey.sock", ValkeyAddress(path="/run/valkey.sock")),
        ("valkey+unix:///run/valkey.sock", ValkeyAddress(path="/run/valkey.sock")),
    ],
)
def test_an_address_is_read(url: str, want: ValkeyAddress) -> None:
    assert ValkeyAddress.parse(url) == want
    assert ValkeyAddress.parse(str(want)) == ValkeyAddress(want.host, want.port, want.path, "", want.is_tls)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("valkey://kv:secret@h", "password_file"),
        ("http://h", "not the address"),
        ("h:6379", "not the address"),
        ("valkey://", "not the address"),
        ("valkey://h/2", "not the address"),
        ("valkey://h:99999", "allowed is"),
        ("valkey://h:0", "not the address"),
        (f"valkey://{'h' * 64}", "too long"),
        ("valkey://h..x", "empty or too long"),
        ("valkey://h:x", "allowed is"),
        ("valkey://h?ca=/x", "not options"),
        ("valkeys://h?ca=", "not options"),
        ("valkeys://h?verify=no", "not options"),
        ("valkey+unix:run.sock", "begins with /"),
        ("valkey://[::1", "allowed is"),
        ("", "not the address"),
    ],
)
def test_no_address_is_refused_in_one_line(url: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        ValkeyAddress.parse(url)
    assert "\n" not in str(caught.value) and "secret" not in str(caught.value)


def test_a_value_of_another_type_is_none_of_ours_and_says_nothing_of_the_engine(server: ValkeyServer) -> None:
    server.empty()
    engine, key = on(server.port), key_of(1)
    assert server.say(b"RPUSH", key, b"x") == b":1\r\n"
    with pytest.raises(WrongSize, match="another type") as found:
        engine.read(key, slot())
    assert not found.value.is_of_engine
    assert engine.delete([key]) == 1 and engine.read(key, slot()) is False
    engine.close()
