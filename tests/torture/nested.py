"""Fuzzing within: what other processes, disks and people give is changed inside of what guards it.

    packed namespaces    JSON in deflate; what is taken can be packed, kept, shown
    tickets              MessagePack under a MAC of the tenant's
    admin answers        what `kvstore stat` and its kin are told, and print
    settings             TOML
    traces, prompts      JSON lines
    ledgers              shared memory that a keeper hands over
    slab headers         under MACs that are right
    requests             MessagePack of every verb

Each target starts from what is right, changes values, types, lengths and nesting, makes checksums and MACs right again,
and gives it to the real parser. Only the exceptions that are declared may come out, and memory stays what it was. What
a disk holds is given to a whole store in `torture.nested_disk`.
"""

from __future__ import annotations

import gc
import json
import struct
import zlib
from collections import Counter
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import msgspec

from kvstore.block.account import HitTier, MissReason
from kvstore.block.errors import BadInput
from kvstore.block.identity import MAX_PACKED_BYTES, Namespace, TenantKeys, check_can_be_kept, pack_about, unpack_about
from kvstore.block.layout import Attention, KvGroup, Layout
from kvstore.cli.ask import read_prompts
from kvstore.cli.report import namespaces_report, stat_report
from kvstore.client.connection import checked_facts
from kvstore.client.framing import unpack_outline
from kvstore.insight.trace import read_trace
from kvstore.protocol import messages as m
from kvstore.protocol.lease_ticket import LeaseTicket
from kvstore.protocol.messages import Grant
from kvstore.protocol.words import layout_in_words, printable
from kvstore.service.settings import read_settings
from kvstore.status import tree as f
from tiering.dram.extents import Extent
from tiering.dram.keeping import Ledger
from tiering.errors import BlockCorrupt
from tiering.slab_header import PAGE_BYTES, read_slab_header
from torture import Report, quiet
from torture.mutate import EDGES, WIDE, as_json, invalid_pages, mutated, odd
from torture.mutations import VALID, Booty

T = TypeVar("T")
MOST_GROWN_BYTES = 64 << 20
MOST_LINE = 3000
"""Characters of an error's line."""
KEYS = TenantKeys.derive(bytes(range(32)))


class Ring:
    """`MacKeys` that knows one tenant, under any key id."""

    def mac_key(self, tenant: bytes, key_id: bytes, epoch: int) -> bytes | None:
        """That tenant's."""
        return KEYS.mac

    slab_key = mac_key


class Refused(Exception):
    """A parser refused what it was given, with an exception that it declares."""


def given_to(parser: Callable[..., T], *given: Any, refuses: type[Exception] = ValueError) -> T:
    """What it makes of it. refuses: what it may raise; its line can be printed, and sent."""
    try:
        return parser(*given)
    except refuses as error:
        line = str(error)
        assert line and len(line) <= MOST_LINE, f"a line of {len(line)} characters: {line[:200]}"
        msgspec.msgpack.encode(m.failed(m.RequestFault.BAD_INPUT, line))
        raise Refused from error


# Namespaces -----------------------------------------------------------------------------------------------------------

NAMESPACES = (
    Namespace("a" * 40, Layout.gqa(layers=2, kv_heads=2, head_dim=8, dtype="bfloat16"), "raw"),
    Namespace(
        "b" * 64,
        Layout.gqa(layers=61, kv_heads=8, head_dim=128, dtype="float16", head_shards=8, layer_shards=2),
        "int8-kc64",
        7,
        {"rope": "1e6", "kv_scales": "c" * 64},
    ),
    Namespace(
        "c",
        Layout(
            (
                KvGroup("full", (0, 2), 4, (16, 16), "float16"),
                KvGroup("near", (1, 3), 2, (8,), "uint8", Attention.SLIDING, 512),
            ),
            head_shards=2,
        ),
        "raw",
    ),
)
FIELDS = [json.loads(zlib.decompress(one.pack())) for one in NAMESPACES]


def packed_bytes(random: Random) -> bytes:
    """A packed namespace, changed within, or around."""
    fields = mutated(random, random.choice(FIELDS))
    raw = zlib.compress(as_json(random, fields).encode("utf-8", "surrogatepass"))
    return invalid_pages(random, raw) if random.random() < 0.08 else raw


def some_payloads(random: Random, count: int) -> list[Any]:
    """Payload sizes that may be none."""
    sizes: list[Any] = [8192] * count
    return mutated(random, sizes, wire=True) if count and random.random() < 0.2 else sizes


def packed(random: Random) -> str:
    namespace = given_to(Namespace.unpack, packed_bytes(random))
    again = namespace.pack()
    if len(again) <= MAX_PACKED_BYTES:
        assert Namespace.unpack(again).digest() == namespace.digest(), "packed again it is another one"
    msgspec.msgpack.encode([layout_in_words(namespace.layout), printable(namespace.model), namespace.weights_epoch])
    assert isinstance(namespace.difference(NAMESPACES[0]), str)
    parts = namespace.layout.parts
    sizes: Any = [part.raw_bytes for part in parts]
    if random.random() < 0.5:
        sizes = mutated(random, sizes)
    given_to(check_can_be_kept, namespace, sizes, refuses=BadInput)
    kept, found = unpack_about(pack_about(namespace, sizes))
    assert kept == list(sizes) and found.digest() == namespace.digest()
    return "taken"


# Tickets --------------------------------------------------------------------------------------------------------------

GRANT = Grant(0, KEYS.identity, (b"stamp",) * 2, (8192, 8192))
TICKET = LeaseTicket(
    b"r" * 16,
    7,
    "request",
    1,
    3,
    bytes(64),
    ([5, 6], [7, 8]),
    (bytes(32), bytes(32)),
    [(HitTier.ENGINE, 64), (HitTier.DRAM, 128)],
    [(MissReason.ABSENT, 64)],
    MissReason.ABSENT,
    "",
)
TICKET_FIELDS = msgspec.to_builtins(TICKET, builtin_types=(bytes,))


def ticket(random: Random) -> str:
    body = msgspec.msgpack.encode(mutated(random, TICKET_FIELDS, wire=True))
    if random.random() < 0.05:
        body = invalid_pages(random, body)
    sealed = msgspec.msgpack.decode(msgspec.msgpack.encode(TICKET.seal(GRANT)))[:1] + _ticket_mac(body) + body
    opened = given_to(LeaseTicket.open, sealed, GRANT)
    reply, keys, account = opened.reply(), opened.prompt_keys(), opened.account()
    assert len(keys) >= (reply.blocks if reply.lease else 0) and account.asked >= 0
    account.cut(64 * reply.blocks, MissReason.EVICTED)
    return "taken"


def _ticket_mac(body: bytes) -> bytes:
    state = blake2b(digest_size=32, key=GRANT.identity_key, person=b"kv-lease-ticket")
    for stamp in GRANT.stamps:
        state.update(len(stamp).to_bytes(4, "little") + stamp)
    state.update(len(body).to_bytes(8, "little") + body)
    return state.digest()


# Admin answers --------------------------------------------------------------------------------------------------------

LOOKED = f.LookupCounts(128, {"dram": 64}, {"absent": 64}, 0, 2, {"dram": 1}, {"absent": 1}, 0, 1, 1, 0, 64, 0.5)
STATES = ("used", "free", "reserved", "deleting", "quarantined", "zombie")
FACTS = f.SidecarStatus(
    "ab" * 16,
    1,
    "ready",
    1e9,
    100.0,
    [f.TierStatus("dram", 1 << 30, 1 << 20, dict.fromkeys(STATES, 1))],
    2,
    1,
    0,
    4096,
    LOOKED,
    [f.NamespaceStatus("a" * 12, "a" * 64, "default", "m", "2 layers", "raw", 0, 64, 2, 2, 8192, 2, 8192, 9e8, LOOKED)],
    [f.MoveCounts("dram", "save", 1, 1, 1, 0)],
    [f.SessionStatus("vllm", "default", 1, 1, 2, 0, 9e8, 0.1, 0.2)],
    0,
    {"evicted": 3},
    f.DoorStatus(1, 1, 0, 0, {"match": 4}, 0.1, 0.3),
    f.RecoveryStatus(1, 2, 3, 4, 5),
    f.ScrubUsage(1, 1, 1, 1, 0, 0, 0, False, 1.0, 9e8),
    tenants=[
        f.TenantStatus("default", 0.5, 1.0, 1, 1, 1, 1, 1, 1, 1, 1),
        f.TenantStatus("b", None, None, 1, 1, None, None),
    ],
    nvme_writes="all",
    write_budget=f.WriteBudget(1e6, 1e5, 1e7),
    policy="lru",
    retained_fraction=0.5,
)
ANSWERS = [
    msgspec.to_builtins(m.Reply(1, one, [3]), builtin_types=(bytes,))
    for one in (
        m.StatReply(FACTS),
        m.NamespacesReply([m.Opened("a" * 64, NAMESPACES[0].pack(), [8192], 2)], 0),
        m.Recorded(bytes(16), 64, [(0.5, [1, 2, 3])], 0),
        m.Counted(3),
        m.Failed(m.RequestFault.BUSY, "why"),
    )
]


def admin_answer(random: Random) -> str:
    body = msgspec.msgpack.encode(mutated(random, random.choice(ANSWERS), wire=True))
    outline, _ = given_to(unpack_outline, invalid_pages(random, body) if random.random() < 0.05 else body)
    answer = given_to(m.unpack_answer, outline.answer)
    if not isinstance(answer, m.StatReply):
        return "taken"
    found = given_to(checked_facts, answer.facts)
    for made in (stat_report, namespaces_report):
        report = made(found)
        json.dumps(report.to_dict(), allow_nan=False)
        assert [*report.lines]
    return "taken"


# Settings, traces, prompts --------------------------------------------------------------------------------------------

SETTINGS: dict[str, Any] = {
    "store": {"data": "/tmp/kv", "dram": "1GiB", "nvme": "2GiB", "scrub": "8MiB/s", "prefault": False, "policy": "lru"},
    "limits": {"leases": 100, "lease_seconds": 30.0, "namespaces": 64, "retained_fraction": 0.5},
    "door": {"socket": "/tmp/a.sock", "mode": "660", "users": [0, 1000], "share": 0.5, "weight": 2.0, "rate": 100.0},
    "tenants": {"b": {"socket": "/tmp/b.sock", "users": [5], "share": 0.2}},
    "admin": {"socket": "/tmp/admin.sock"},
    "http": {"listen": "127.0.0.1:0"},
    "log": {"level": "info", "format": "text"},
}


def settings(random: Random) -> str:
    text = as_toml(mutated(random, SETTINGS))
    raw = text.encode("utf-8", random.choice(("surrogatepass", "replace")))
    given_to(read_settings, invalid_pages(random, raw) if random.random() < 0.1 else raw, refuses=BadInput)
    return "taken"


def as_toml(value: Any, inline: bool = False) -> str:
    """The text of it, as far as TOML has such values."""
    if isinstance(value, dict):
        pairs = [(json.dumps(key), one) for key, one in value.items()]
        if inline:
            return "{" + ", ".join(f"{key} = {as_toml(one, True)}" for key, one in pairs) + "}"
        return "\n".join(f"{key} = {as_toml(one, True)}" for key, one in pairs)
    if isinstance(value, list):
        return "[" + ", ".join(as_toml(one, True) for one in value) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value if value is not None else [])


LINES: list[Any] = [
    {"timestamp": at, "input_length": 1025 + at, "output_length": 20, "hash_ids": [0, 1, at + 2]} for at in range(3)
]


def trace(random: Random) -> str:
    lines = [as_json(random, mutated(random, line) if random.random() < 0.6 else line) for line in LINES]
    block_tokens = random.choice((None, None, 512, 1, 0, -1, 1 << 31, 1 << 70))
    read = given_to(read_trace, "trace", lines, block_tokens, refuses=BadInput)
    assert read.requests and len(read.blocks) == read.starts[-1]
    return "taken"


PROMPT: Any = {"token_ids": [1, 2, 3], "extra_keys": ["salt", {"hex": "00ff", "first_token": 2}]}


def prompts(random: Random) -> str:
    given_to(read_prompts, "prompts", [as_json(random, mutated(random, PROMPT))], refuses=BadInput)
    return "taken"


# Memory of an earlier process -----------------------------------------------------------------------------------------

SLAB = struct.Struct("<8sI8sI16s32sIQII16sI")  # of a slab's header, as tiering.nvme.slab has it
EXTENT_BYTES = 64 << 10
ABOUTS = [pack_about(one, [part.raw_bytes for part in one.layout.parts]) for one in NAMESPACES]


def _about(random: Random) -> bytes:
    if random.random() < 0.5:
        return random.choice(ABOUTS)
    raw = packed_bytes(random)
    count = random.choice((0, 1, 1, 2, 16, 500, 65_535))
    sizes = [random.choice((8192, *EDGES[:12], *WIDE[:3])) for _ in range(min(count, 600))]
    sizes = [max(0, size) for size in sizes]
    return (struct.pack(f"<H{len(sizes)}Q", count, *sizes) + raw)[: PAGE_BYTES - SLAB.size - 32]


def _slab_page(random: Random, mac_key: bytes) -> bytes:
    """A slab's header with any fields, and a MAC that is right."""
    about = _about(random)
    fields: list[Any] = [
        b"KVSLAB\0\0", 1, KEYS.key_id, 1, KEYS.tenant, NAMESPACES[0].digest(), 0, 12_288, 5, 3, b"u" * 16, len(about)
    ]  # fmt: skip
    for at in random.sample(range(12), random.choice((0, 1, 1, 2))):
        wide = at in (7,)
        if isinstance(fields[at], int):
            fields[at] = odd(random, fields[at], True) if random.random() < 0.9 else 0
            if not isinstance(fields[at], int) or fields[at] < 0 or fields[at] >= (1 << 64 if wide else 1 << 32):
                fields[at] = random.choice((0, 1, 4096, (1 << 32) - 1))
        else:
            fields[at] = random.randbytes(len(fields[at]))
    used = SLAB.pack(*fields) + about
    mac = blake2b(used, digest_size=32, key=mac_key, person=b"kv-slab").digest()
    page = (used + mac).ljust(PAGE_BYTES, b"\0")[:PAGE_BYTES]
    return invalid_pages(random, page)[:PAGE_BYTES].ljust(PAGE_BYTES, b"\0") if random.random() < 0.1 else page


def ledger(random: Random) -> str:
    size = random.choice((PAGE_BYTES, 2 * PAGE_BYTES, 2 * PAGE_BYTES, 3 * PAGE_BYTES))
    memory = Extent(size)
    try:
        memory.view[:PAGE_BYTES] = _slab_page(random, b"")
        if size > PAGE_BYTES:
            struct.pack_into(
                "<QQ", memory.view, PAGE_BYTES, random.choice((0, 7)), random.choice((0, 1, *WIDE[:7], (1 << 64) - 1))
            )
        extent_bytes = random.choice((EXTENT_BYTES, 5 * 12_288, 4096))
        found = given_to(Ledger.found, memory, b"u" * 16, extent_bytes, refuses=BlockCorrupt)
        for slot, generation in enumerate(found.generations):
            struct.pack("<Q", generation + 1)
            found.strike(slot)
        about = found.about
        found.generations.release()
        return _taken_about(about)
    finally:
        memory.close()


def _taken_about(about: bytes) -> str:
    payloads, namespace = given_to(unpack_about, about)
    assert len(payloads) == len(namespace.layout.parts)
    return "taken"


# Disks ----------------------------------------------------------------------------------------------------------------


def slab_header(random: Random) -> str:
    header = given_to(read_slab_header, _slab_page(random, KEYS.mac), Ring(), refuses=BlockCorrupt)
    assert header.size_bytes > 2 * PAGE_BYTES and header.pack(KEYS.mac)
    return _taken_about(header.about)


# Requests -------------------------------------------------------------------------------------------------------------

BOOTY = Booty(1, 2, 3, 4, [bytes(32)] * 3)


def request(random: Random) -> str:
    verb = VALID[random.choice(tuple(VALID))](random, BOOTY)
    message = mutated(random, [7, msgspec.to_builtins(verb, builtin_types=(bytes,))], wire=True)
    read = given_to(m.unpack_request, msgspec.msgpack.encode(message))
    assert m.name_of(read.verb) and m.pack(read)
    return "taken"


# The campaign ---------------------------------------------------------------------------------------------------------


TARGETS: dict[str, tuple[Callable[[Random], str], float]] = {
    "packed namespaces": (packed, 0.45),
    "tickets": (ticket, 0.1),
    "admin answers": (admin_answer, 0.08),
    "settings": (settings, 0.05),
    "traces": (trace, 0.07),
    "prompts": (prompts, 0.05),
    "ledgers": (ledger, 0.05),
    "slab headers": (slab_header, 0.11),
    "requests": (request, 0.04),
}
"""Each with its share of all cases."""


def outcome(name: str, random: Random) -> str:
    """Of one case: taken, or refused."""
    try:
        return TARGETS[name][0](random)
    except Refused:
        return "refused"


def nested(count: int, seed: int, report: Report = quiet) -> dict[str, int]:
    """That many cases in this process; how many were taken and refused, by target."""
    counts: Counter[str] = Counter()
    names, shares = list(TARGETS), [share for _, share in TARGETS.values()]
    before = 0
    for number in range(count):
        random = Random(f"{seed} {number}")  # each case can be repeated alone
        name = random.choices(names, shares)[0]
        try:
            counts[f"{name} {outcome(name, random)}"] += 1
        except Exception as error:
            raise AssertionError(
                f"seed {seed}, case {number}, {name}: {type(error).__name__}: {error!s:.300}"
            ) from error
        if number == min(2000, count // 2):  # what is loaded and cached is there by then
            gc.collect()
            before = resident_bytes()
        if number % 500 == 499:
            report(number + 1)
    gc.collect()
    grown = max(0, resident_bytes() - before)
    assert grown <= MOST_GROWN_BYTES, f"seed {seed}: memory grew by {grown >> 20} MiB in {count} cases"
    counts["grown_mib"] = grown >> 20
    report(count)
    return dict(sorted(counts.items()))


def resident_bytes(pid: int | str = "self") -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith("VmRSS"))) << 10
