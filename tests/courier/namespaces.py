"""Hosts of a rack: network namespaces on a bridge, whose links can be cut, cut one way, and throttled. Needs root."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count

import pytest

_numbers = count(1)


def _run(*arguments: str) -> None:
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(arguments)}: {done.stderr}"


class Rack:
    """So many hosts, each with an address."""

    def __init__(self, hosts: int) -> None:
        self.name = f"kv{os.getpid()}x{next(_numbers)}"
        self.switch = f"{self.name}s"
        self.hosts = [f"{self.name}h{at}" for at in range(hosts)]

    def build(self) -> None:
        _run("ip", "netns", "add", self.switch)
        _run("ip", "-n", self.switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", self.switch, "link", "set", "br0", "up")
        for at, host in enumerate(self.hosts):
            _run("ip", "netns", "add", host)
            peer = ("type", "veth", "peer", "name", "eth0", "netns", host)
            _run("ip", "link", "add", f"p{at}", "netns", self.switch, *peer)
            _run("ip", "-n", self.switch, "link", "set", f"p{at}", "master", "br0", "up")
            _run("ip", "-n", host, "addr", "add", f"{self.address(at)}/24", "dev", "eth0")
            _run("ip", "-n", host, "link", "set", "eth0", "up")
            _run("ip", "-n", host, "link", "set", "lo", "up")

    def tear_down(self) -> None:
        for name in (*self.hosts, self.switch):
            with suppress(AssertionError):
                _run("ip", "netns", "del", name)

    def address(self, host: int) -> str:
        return f"10.78.0.{10 + host}"

    def wrap(self, host: int) -> list[str]:
        """Before the command of a process of that host."""
        return ["ip", "netns", "exec", self.hosts[host]]

    def cut(self, host: int) -> None:
        """From all others."""
        _run("ip", "-n", self.switch, "link", "set", f"p{host}", "down")

    def cut_one_way(self, host: int, other: int) -> None:
        """What host sends to the other is lost."""
        _run("ip", "-n", self.hosts[host], "route", "replace", "blackhole", f"{self.address(other)}/32")

    def throttle(self, host: int, rate: str = "8mbit") -> None:
        """What it is sent."""
        shape = ("root", "tbf", "rate", rate, "burst", "32kb", "latency", "400ms")
        _run("tc", "-n", self.switch, "qdisc", "replace", "dev", f"p{host}", *shape)

    def heal(self) -> None:
        """All links as they were."""
        for at, host in enumerate(self.hosts):
            _run("ip", "-n", self.switch, "link", "set", f"p{at}", "up")
            with suppress(AssertionError):
                _run("tc", "-n", self.switch, "qdisc", "del", "dev", f"p{at}", "root")
            for other in range(len(self.hosts)):
                with suppress(AssertionError):
                    _run("ip", "-n", host, "route", "del", "blackhole", f"{self.address(other)}/32")


@contextmanager
def rack(hosts: int) -> Iterator[Rack]:
    """Skips where this process may not."""
    made = Rack(hosts)
    try:
        made.build()
    except (AssertionError, FileNotFoundError) as error:
        made.tear_down()
        pytest.skip(f"no network namespaces can be made here: {error}")
    try:
        yield made
    finally:
        made.tear_down()
