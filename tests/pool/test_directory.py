"""What a chunk is, and who leads: only nodes that are alive, in this run of theirs, and without a gap."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvstore.block.account import HitTier
from kvstore.block.identity import NodeIdentity
from kvstore.pool.directory import (
    CHUNK_BLOCKS,
    FORGOTTEN_SECONDS,
    HINT_SECONDS,
    MAX_ENTRY_BYTES,
    MAX_FINGERPRINTS,
    MAX_HEADS,
    NODE_SECONDS,
    AliveTable,
    ClaimState,
    NodeClaim,
    NodeEntry,
    chunk_heads,
    entry_bytes,
    hint_name,
    hint_value,
    is_head,
    leading_holders,
    leading_places,
    read_entry,
    read_hint,
)

NAMESPACE = bytes(16)
RUN, OTHER_RUN = bytes(8), b"another."
TIERS = [HitTier.DRAM, HitTier.NVME]


def keys(count: int) -> list[bytes]:
    return [index.to_bytes(32, "big") for index in range(count)]


def node(number: int) -> bytes:
    return number.to_bytes(16, "big")


def entry(number: int, run: bytes = RUN) -> NodeEntry:
    return NodeEntry(node(number), run, "127.0.0.1:1")


@given(st.integers(0, 200), st.integers(0, 200))
def test_each_whole_chunk_behind_the_first_blocks_has_a_hint(blocks: int, first: int) -> None:
    heads = chunk_heads(NAMESPACE, keys(blocks), first)
    ends = [index + 1 for index in range(blocks) if is_head(index) and index + 1 > first]
    assert [end for end, _ in heads] == ends
    assert [name for _, name in heads] == [hint_name(NAMESPACE, keys(blocks)[end - 1]) for end in ends]


def test_a_name_is_of_namespace_and_prompt_and_look_ups_are_bounded() -> None:
    key = keys(1)[0]
    assert hint_name(NAMESPACE, key) != hint_name(b"\1" * 16, key)
    assert hint_name(NAMESPACE, key) != hint_name(NAMESPACE, keys(2)[1])
    assert chunk_heads(NAMESPACE, keys(CHUNK_BLOCKS - 1)) == []
    assert len(chunk_heads(NAMESPACE, keys(CHUNK_BLOCKS * (MAX_HEADS + 3)), first=5)) == MAX_HEADS


@given(count=st.integers(0, MAX_HEADS), most=st.integers(2, 40))
def test_of_a_long_prompt_the_same_share_goes_unseen_wherever_a_node_s_part_ends(count: int, most: int) -> None:
    heads = [(CHUNK_BLOCKS * number, bytes([number % 256])) for number in range(1, count + 1)]
    places = leading_places(heads, most)
    assert len(places) == min(count, most) and places[-1:] == heads[-1:]
    ends = [blocks // CHUNK_BLOCKS for blocks, _ in places]
    assert places == [heads[end - 1] for end in ends] and ends == sorted(set(ends)) and ends[:1] == [1][:count]
    factor = count ** (1 / (most - 1))
    for before, after in pairwise(ends):
        assert after <= max(before + 1, before * factor + 1), "about the same factor from place to place"


@given(st.data())
def test_holders_lead_without_a_gap_and_are_alive(data: st.DataObject) -> None:
    chunks, nodes = data.draw(st.integers(0, 6)), data.draw(st.integers(0, 5))
    heads = [(16 * (at + 1), node(at)) for at in range(chunks)]
    alive = {node(number): entry(number) for number in range(nodes) if data.draw(st.booleans())}
    values = st.sampled_from(
        [hint_value(RUN, tier) for tier in TIERS] + [hint_value(OTHER_RUN, HitTier.DRAM), b"", b"x" * 9, b"y" * 40]
    )
    said = [
        {node(number): data.draw(values) for number in range(nodes) if data.draw(st.booleans())} for _ in range(chunks)
    ]
    found = leading_holders(heads, said, alive)
    assert [one.blocks for one in found] == sorted((one.blocks for one in found), reverse=True)
    for number in range(nodes):
        led = 0
        while led < chunks and said[led].get(node(number)) in [hint_value(RUN, tier) for tier in TIERS]:
            led += 1
        want = [16 * led] if led and node(number) in alive else []
        assert [one.blocks for one in found if one.node == node(number)] == want
    assert all(alive[one.node].incarnation == one.incarnation for one in found)


def test_the_tier_is_the_slowest_of_them() -> None:
    heads = [(16, b"a"), (32, b"b")]
    said = [{node(1): hint_value(RUN, HitTier.NVME)}, {node(1): hint_value(RUN, HitTier.DRAM)}]
    assert [one.tier for one in leading_holders(heads, said, {node(1): entry(1)})] == [HitTier.NVME]


@given(st.integers(0, 1 << 41), st.integers(-(1 << 40), 1 << 40))
def test_a_stamp_counts_by_the_directory_s_clock_alone(until_ms: int, now_ms: int) -> None:
    value = hint_value(RUN, HitTier.DRAM, until_ms)
    is_good = 0 < until_ms - now_ms <= 1e3 * HINT_SECONDS
    assert read_hint(value, now_ms) == ((RUN, HitTier.DRAM) if is_good else None)
    assert read_hint(value, None) is None
    assert read_hint(hint_value(RUN, HitTier.DRAM), None) == (RUN, HitTier.DRAM)


def test_an_entry_comes_back_as_it_was() -> None:
    one = NodeEntry(node(1), RUN, "10.0.0.1:7470", (b"12345678",), (1, 2), ("ucx", "sockets"))
    assert read_entry(node(1), entry_bytes(one)) == one
    largest = NodeEntry(node(1), RUN, "h" * 300, (b"f" * 16,) * MAX_FINGERPRINTS, tuple(range(16)), ("t" * 32,) * 8)
    assert len(entry_bytes(largest)) <= MAX_ENTRY_BYTES


def test_what_is_no_entry_of_that_node_is_none() -> None:
    good = entry_bytes(entry(1))
    assert read_entry(node(2), good) is None, "another node's"
    for bad in (None, 5, b"", b"null", b"[" * 3000, good[:-1], good + b" " * MAX_ENTRY_BYTES, b'{"node":"AA=="}'):
        assert read_entry(node(1), bad) is None
    for was, then in ((b'"127.0.0.1:1"', b'"' + b"x" * 301 + b'"'), (b'"versions":[]', b'"versions":' + b"[1]" * 9)):
        assert read_entry(node(1), good.replace(was, then)) is None


def test_an_address_is_a_host_and_a_port() -> None:
    """gRPC takes `unix:/run/x`, `dns://server/x` and others for addresses, too."""
    odd = ("unix:/run/x:1", "unix:///run/x:1", "dns://10.0.0.1/x:1", "ipv4:10.0.0.1:1,10.0.0.2:1", "a b:1", "a@b:1", "")
    for address in (
        *odd,
        "a:1\r\n",
        "a:1\n",
        "a",
        "a:",
        ":1",
        "a:123456",
        "[unix:x]:1",
        "-a:1",
        "a%2f:1",
        "h" * 300 + ":1",
    ):
        assert read_entry(node(1), entry_bytes(NodeEntry(node(1), RUN, address))) is None, address
    for address in ("127.0.0.1:7470", "[2001:db8::1]:7470", "kv-0.kv.pool.svc.cluster.local:7470", "host_1:1"):
        assert read_entry(node(1), entry_bytes(NodeEntry(node(1), RUN, address))) is not None, address


HERE = NodeIdentity(b"h" * 16, b"run now.")
BEFORE, CLONE = b"run bef.", b"run cln."


def test_an_entry_is_believed_for_some_seconds_and_the_last_one_counts() -> None:
    table = AliveTable(HERE)
    table.saw([entry(1), NodeEntry(HERE.node, CLONE, "a:1")], 100.0)
    table.saw([entry(1, b"87654321")], 101.0)
    assert table.alive(101.0 + NODE_SECONDS - 0.1) == {entry(1).node: entry(1, b"87654321")}
    assert table.alive(101.0 + NODE_SECONDS) == {}
    table.saw([entry(2)], 200.0)
    table.gone(entry(2).node)
    assert table.alive(200.0) == {}


def test_the_entry_of_the_run_before_is_waited_for() -> None:
    claim = NodeClaim(HERE)
    assert not claim.look(BEFORE, 0.0) and claim.state == ClaimState.UNSURE
    assert not claim.look(BEFORE, NODE_SECONDS) and claim.state == ClaimState.UNSURE
    assert claim.look(None, NODE_SECONDS + 1) and claim.state == ClaimState.OURS


def test_another_run_that_stays_or_takes_our_place_is_a_clone() -> None:
    stays = NodeClaim(HERE)
    assert not stays.look(CLONE, 0.0)
    assert not stays.look(CLONE, FORGOTTEN_SECONDS + 0.1) and stays.state == ClaimState.CLONED
    assert stays.look(None, 20.0) and stays.state == ClaimState.OURS, "it is gone"
    assert not stays.look(CLONE, 21.0) and stays.state == ClaimState.CLONED, "the place was ours"


@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), st.booleans(), st.floats(0.1, 3.0)), max_size=60), st.data())
def test_of_two_that_look_before_they_write_one_is_left(
    turns: list[tuple[str, bool, float]], data: st.DataObject
) -> None:
    """Two runs of one node, and a key that expires; each may be slow between looking and writing."""
    runs = {"a": b"run a...", "b": b"run b..."}
    claims = {who: NodeClaim(NodeIdentity(HERE.node, run)) for who, run in runs.items()}
    now, key, until = 0.0, None, 0.0
    pending: dict[str, bool] = {}
    for who, writes, seconds in turns:
        now += seconds
        found = key if now < until else None
        if who in pending:
            pending.pop(who)
            key, until = runs[who], now + NODE_SECONDS
        elif claims[who].look(found, now):
            if writes:
                key, until = runs[who], now + NODE_SECONDS
            else:
                pending[who] = True  # it writes with its next turn
    for _ in range(12):
        for who in runs:
            now += 0.75
            found = key if now < until else None
            if claims[who].look(found, now):
                key, until = runs[who], now + NODE_SECONDS
    assert sorted(claim.state for claim in claims.values()) == [ClaimState.CLONED, ClaimState.OURS]
