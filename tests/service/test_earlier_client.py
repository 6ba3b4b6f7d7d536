"""A client of an earlier version works with this sidecar: what it said is said again, and answered as it reads it."""

from __future__ import annotations

import base64
import json
import os
import socket
from pathlib import Path
from typing import Any

import msgspec

from service.sidecar import Sidecar

EARLIER = Path(__file__).parents[1] / "data/earlier/session.json"


class EarlierClient:
    """Its end of a socket, in bytes: nothing here knows a message of this version."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(20)
        self._socket.connect(str(path))
        self._read = bytearray()
        self._descriptors = 0

    def say(self, number: int, verb: list[Any]) -> None:
        body = msgspec.msgpack.encode([number, verb])
        self._socket.sendall(len(body).to_bytes(4, "little") + body)

    def hear(self, number: int) -> tuple[list[Any], int]:
        """The answer to a message, and how many descriptors came with it."""
        while len(self._read) < 4 or len(self._read) < 4 + int.from_bytes(self._read[:4], "little"):
            piece, descriptors, _, _ = socket.recv_fds(self._socket, 1 << 18, 32)
            assert piece, "the sidecar hung up"
            self._descriptors += len(descriptors)
            for one in descriptors:
                os.close(one)
            self._read += piece
        length = 4 + int.from_bytes(self._read[:4], "little")
        answered, answer, *_ = msgspec.msgpack.decode(bytes(self._read[4:length]))
        del self._read[:length]
        assert answered == number
        count, self._descriptors = self._descriptors, 0
        return answer, count

    def close(self) -> None:
        self._socket.close()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return base64.b64decode(value["bytes"])
    return [_plain(one) for one in value] if isinstance(value, list) else value


def test_an_earlier_client_puts_and_reads(tmp_path: Path) -> None:
    recorded = json.loads(EARLIER.read_text())
    given: dict[str, Any] = {}
    with Sidecar(tmp_path) as sidecar:
        client = EarlierClient(sidecar.path)
        heard = iter(recorded["heard"])  # the client did not read what came of its release
        for number, verb in enumerate(map(_plain, recorded["said"]), 1):
            name = verb[0]
            if name in ("match", "reserve", "lease", "drop"):
                verb[1] = given["namespace"]
            elif name == "extents":
                verb[1] = [given["extent"]]
            elif name == "commit":
                verb[1] = given["reservation"]
            elif name == "release":
                verb[1] = [given["lease"]]
            client.say(number, verb)
            answer, descriptors = client.hear(number)
            if name == "release":
                assert answer == ["done"]
                continue
            was = next(heard)
            assert answer[0] == was["tag"] and len(answer) >= was["fields"], (name, answer)
            assert descriptors == was["descriptors"]
            if was["keys"]:
                assert set(was["keys"]) <= set(answer[1]), f"what it reads of {name}"
            if name == "namespace":
                given["namespace"] = answer[1]["number"]
            elif name in ("reserve", "lease"):
                held = "reservation" if name == "reserve" else "lease"
                given[held] = answer[1][held]
                given["extent"] = answer[1]["places"][0][0] >> 24
                assert answer[1]["blocks"] in (4, [0, 1, 2, 3])
            elif name in ("commit", "drop"):
                assert answer[1] == 4
        client.close()
