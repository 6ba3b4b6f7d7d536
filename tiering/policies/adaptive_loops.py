"""The adaptive policy's per-block work, compiled by numba, and the arrays that it works on. `adaptive` explains what
and why, and makes and keeps the arrays.

The functions of `AdaptiveLoops` are its entrances: the first `prepare` compiles them, with all that they call. A call
costs more with each array argument, and most take less than a microsecond: so a call gets a single address, of an array
that says where they are (`Arrays`).

    order     blocks of the tier: a ring in the order of their last use
    ghost     the same of names in place of blocks, with the tree over them
    leaves    of the tier and of the learning ghost, in no order
    history   names in the order of their last use
    requests  not yet fully learned and told to the ghosts, oldest first, and what is known of them

Node 0 is a ring's two ends, and row r is node r + 1, so that zeroed memory is empty. Names are looked up by hash in
chains of nodes, which `heads` begin: with few heads that is slow, and never wrong. All of it is one file, because numba
keeps what it compiled as long as the file of an entrance stays as it is.
"""

from __future__ import annotations

from logging import getLogger
from typing import Any, NamedTuple

import numpy as np
from numba import carray, config, from_dtype, int32, int64, njit, types
from numba.extending import intrinsic

_log = getLogger(__name__)

INSERTED, REMOVED, LEAF, INNER, TOUCHED = range(5)
EVENT_BITS = 3
"""Events, each in so many bits of a number: above them a row, or how many rows stand behind it."""

KINDS = 8
"""Of blocks: bit 0, whether it was its request's last one; above it how often it was used: once, 2-3, 4-7, 8 and
more."""
LAST, LEVEL = 1, 2
STEPS, OCTAVES = 8, 22
"""Ages are counted in uses, in so many steps per octave."""
AGES = STEPS * OCTAVES
CANDIDATES = 64
"""Leaves drawn for one victim."""
SAMPLES = 4
"""Names of the history looked at for each use."""
MOST_GO = 4
"""Blocks that a ghost evicts at most for one that comes, if its room has shrunk."""
RECKON_USES = 2048
"""Uses between two computations of a kind's worth."""
DOUBT = 8.0
"""Looks without a use that every kind has at every age from the start."""

USES, LOOKS, WORTH, GHOST_WORTH = range(4)
"""Learned, by kind and age: uses and looks; the worth; and the worth that the learning ghost uses, which is some
requests behind."""
TABLES = 4

CLOCK, DUE, RULE, DRAWS, SIZE, LEAVES, NODES, FULL = range(8)
"""Indexes of whole numbers: uses so far; when worth is next computed; 1 if the tier goes by it; state of the random
generator; blocks of the tier; its leaves; blocks that a ghost has nodes for; the most blocks at any request for a
victim since the last computation."""
LRU, OWN, NAMES = 8, 15, 22
"""From there on, of the ghosts and of the history, at the offsets `COUNT`, `LEAF_COUNT`, `MOST` and `FREE`: how many
there are, leaves among them, how many there may be, and a node that was given back. Of the ghosts also their progress
with the first waiting request, `LEFT`, `PARENT` and `HITS`: blocks of its chain not yet told, the node of the block
before those, and how many were found."""
COUNT, LEAF_COUNT, MOST, FREE, LEFT, PARENT, HITS = range(7)
TURN, OWN_DRAWS, ROOM, FIRST, WAITING, LEARNED, REACHED, FETCHED = range(26, 34)
"""The kind whose worth is computed next; victims drawn by the learning ghost; blocks that a ghost may have from the
next request on; the first waiting request, how many wait, how many of these were learned, and the progress with the
next; and a sink, so that no compiler drops reads that only prefetch."""
RECKONED = 34
"""From there on, by kind, `CLOCK` when its worth was last computed."""
NUMBERS = RECKONED + KINDS

REQUESTS = 8
"""Requests that can wait. Before another is added, the ghosts take the first; if that takes more than a `STEP`, nothing
is learned from the new one."""
REQUEST = np.dtype(
    [("length", "<i8"), ("count", "<i8"), ("clock", "<i8"), ("room", "<i8"), ("kind", "<i8"), ("worth", "<f8", AGES)]
)
"""length, count: of its chain, and how many of it count as used. clock, room: after it. kind, worth: what was computed
with it; a negative kind for nothing. So ghosts that take a request later act as if they took it at once."""
NAME, KIND, WHEN = range(3)
"""Known of each block of a request: its name, kind and last use. -1 - row in place of the kind if it is not learned, or
unknown."""
TOLD = 3
AT_ONCE = 64
"""Blocks that the ghosts take within a request, unless it is longer itself."""
PIECE = 32
"""Blocks told within a longer one, and learned and told before each victim."""
STEP = 512
"""Blocks learned within a request, and told to the ghosts to make room for it: a fraction of a millisecond."""

LRU_SCORE, OWN_SCORE, SPREAD, SCORE_USES, WEIGHT = range(5)
"""Hits of both ghosts, the squares of their difference per request, and the uses; each counts `WEIGHT`, which grows, so
that old ones count little."""
SCORES = 5
MOST_HALVINGS = 300.0
"""Of scores, by one request: hardly anything is left anyway, and numbers stay finite."""
HALF_LIFE, SCORE_HALF_LIFE, LEAD, FLOOR, MOST_AT_ONCE, MOST_LEARNED = range(6)
"""Settings: half-lives of what is learned and of scores, in uses; the lead that the learning ghost needs, in roots of
`SPREAD` and as a share of uses; `AT_ONCE` and `STEP`."""

_RING = [("when", "<i8"), ("newer", "<i4"), ("older", "<i4"), ("leaf_at", "<i4"), ("kind", "u1")]
ORDER = np.dtype(_RING, align=True)
"""when, kind: of the last use. leaf_at: a leaf's place among the leaves, from 1 on; the LRU ghost lists none."""
_TREE = [("next", "<i4"), ("parent", "<i4"), ("children", "<i4"), ("name", "<i8"), ("_to_a_line", "<i8", 2)]
GHOST = np.dtype([*_RING, *_TREE], align=True)
LEAF_ENTRY = np.dtype([("when", "<i8"), ("node", "<i4"), ("kind", "u1")], align=True)
"""when, kind: as in the ring, so that drawing leaves reads only these entries, which lie close together."""
_CHAIN = [("when", "<i8"), ("name", "<i8"), ("newer", "<i4"), ("older", "<i4"), ("next", "<i4")]
HISTORY = np.dtype([*_CHAIN, ("kind", "u1"), ("uses", "u1")], align=True)

compiled = njit(nogil=True)
"""Of code that the entrances call: compiled together with them."""


class Arrays(NamedTuple):
    """All state. events, heads, told, learned, numbers, scores and settings are numbers, the others records."""

    events: Any
    order: Any
    leaves: Any
    lru: Any
    lru_heads: Any
    own: Any
    own_heads: Any
    own_leaves: Any
    history: Any
    history_heads: Any
    requests: Any
    told: Any
    learned: Any
    numbers: Any
    scores: Any
    settings: Any

    def places(self) -> Any:
        """The array whose address the calls get, valid as long as all of these are kept: each one's address, and the
        length of its last axis."""
        return np.array([(one.ctypes.data, one.shape[-1]) for one in self], np.int64)


ARRAYS = len(Arrays._fields)


@intrinsic
def _pointer(typing_context, address):
    def at_address(context, builder, signature, given):
        return builder.inttoptr(given[0], context.get_value_type(types.voidptr))

    return types.voidptr(address), at_address


@compiled
def arrays_at(address):
    """`Arrays`; the compiler drops unused ones."""
    places = carray(_pointer(address), (ARRAYS, 2), np.int64)
    return (
        carray(_pointer(places[0, 0]), (places[0, 1],), np.int64),
        carray(_pointer(places[1, 0]), (places[1, 1],), ORDER),
        carray(_pointer(places[2, 0]), (places[2, 1],), LEAF_ENTRY),
        carray(_pointer(places[3, 0]), (places[3, 1],), GHOST),
        carray(_pointer(places[4, 0]), (places[4, 1],), np.int32),
        carray(_pointer(places[5, 0]), (places[5, 1],), GHOST),
        carray(_pointer(places[6, 0]), (places[6, 1],), np.int32),
        carray(_pointer(places[7, 0]), (places[7, 1],), LEAF_ENTRY),
        carray(_pointer(places[8, 0]), (places[8, 1],), HISTORY),
        carray(_pointer(places[9, 0]), (places[9, 1],), np.int32),
        carray(_pointer(places[10, 0]), (REQUESTS,), REQUEST),
        carray(_pointer(places[11, 0]), (REQUESTS, TOLD, places[11, 1]), np.int64),
        carray(_pointer(places[12, 0]), (TABLES, KINDS, AGES), np.float64),
        carray(_pointer(places[13, 0]), (NUMBERS,), np.int64),
        carray(_pointer(places[14, 0]), (SCORES,), np.float64),
        carray(_pointer(places[15, 0]), (6,), np.float64),
    )


class AdaptiveLoops(NamedTuple):
    """The functions that `adaptive` calls."""

    follow: Any
    learn: Any
    passed_over: Any
    catch_up: Any
    first_victim: Any
    next_leaf: Any
    enter_all: Any


def is_usable() -> bool:
    """Whether numba may compile here: NUMBA_DISABLE_JIT turns it off."""
    return not config.DISABLE_JIT


class NotCompiled(Exception):
    """Numba is installed, but cannot compile here."""


def prepare() -> AdaptiveLoops:
    """Compile. Some seconds the first time on a machine: later processes find the result on disk, if numba has a place
    to keep it. A place that is full or damaged costs these seconds only. Raises `NotCompiled`."""
    global _ready
    if _ready is None:
        try:
            _ready = _loops(cache=True)
        except NotCompiled as error:  # what is wrong with the compiler, and not with its cache, shows again
            _log.warning(
                "what numba compiled cannot be kept or read: %s; it is compiled for this process alone: free the "
                "disk, or empty that folder (NUMBA_CACHE_DIR, else __pycache__ beside tiering/policies)",
                error,
            )
            _ready = _loops()
    return _ready


def _loops(*, cache: bool = False) -> AdaptiveLoops:
    try:  # where there is no place for a cache, the first lines fail already
        entrances = (_follow, _learn, _passed_over, _catch_up, _first_victim, _next_leaf, _enter_all)
        loops = AdaptiveLoops(*(njit(nogil=True, cache=cache)(entrance) for entrance in entrances))
        _compile(loops)
    except Exception as error:  # of a disk, of whatever damaged bytes make, or of a compiler that is somebody else's
        raise NotCompiled(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from error
    return loops


# Draws and ages ----------------------------------------------------------------------------------------------------


@compiled
def next_state(state):
    """The next state of a generator (xorshift64: G. Marsaglia, Journal of Statistical Software 8 (14), 2003)."""
    state ^= state << np.uint64(13)
    state ^= state >> np.uint64(7)
    return state ^ (state << np.uint64(17))


@compiled
def drawn_from(number):
    """A state unrelated to those of neighbouring numbers: one factor of multiplicative hashing, and a step."""
    return next_state(np.uint64(number) * np.uint64(11400714819323198485))


@compiled
def below(draw, bound):
    """A whole number from 0 to below a bound, from 32 random bits."""
    return np.int64((draw * np.uint64(bound)) >> np.uint64(32))


@compiled
def upper(state):
    """32 random bits."""
    return state >> np.uint64(32)


@compiled
def lower(state):
    """32 others of the same state."""
    return state & np.uint64(0xFFFFFFFF)


@intrinsic
def _bits(typing_context, number):
    def as_whole(context, builder, signature, given):
        return builder.bitcast(given[0], context.get_value_type(types.int64))

    return types.int64(types.float64), as_whole


_FRACTION_BITS, _BIAS = 52, 1023
_STEP_BITS = 3
assert STEPS == 1 << _STEP_BITS


@compiled
def age_of(uses):
    """The step of an age: up to 15 each has its own; above, a number's exponent and the first bits of its fraction say
    which octave and which step of it."""
    step = (_bits(np.float64(uses)) >> (_FRACTION_BITS - _STEP_BITS)) - (_BIAS + _STEP_BITS - 1) * STEPS
    return min(step if uses >= STEPS else uses, AGES - 1)


# Rings and leaves ----------------------------------------------------------------------------------------------------


@compiled
def insert(ring, node, newer):
    """Insert right behind a newer node; behind node 0, at the recent end."""
    older = ring[newer].older
    ring[older].newer = node
    ring[node].older = older
    ring[node].newer = newer
    ring[newer].older = node


@compiled
def take_out(ring, node):
    after, before = ring[node].newer, ring[node].older
    ring[after].older = before
    ring[before].newer = after


@compiled
def move_behind(ring, node, newer):
    if ring[newer].older != node:
        take_out(ring, node)
        insert(ring, node, newer)


@compiled
def add_leaf(ring, leaves, node, numbers, count):
    """count: where in `numbers` the leaves are counted."""
    if ring[node].leaf_at == 0:
        at = numbers[count]
        leaves[at].node = node
        leaves[at].when = ring[node].when
        leaves[at].kind = ring[node].kind
        numbers[count] = ring[node].leaf_at = at + 1


@compiled
def drop_leaf(ring, leaves, node, numbers, count):
    at = ring[node].leaf_at
    if at != 0:
        numbers[count] -= 1
        end = numbers[count]
        if end != at - 1:
            last = leaves[end].node
            leaves[at - 1].node = last
            leaves[at - 1].when = leaves[end].when
            leaves[at - 1].kind = leaves[end].kind
            ring[last].leaf_at = at
        ring[node].leaf_at = 0


@compiled
def mark(ring, leaves, node, kind, when):
    """Record a leaf's last use and its kind."""
    ring[node].kind = kind
    ring[node].when = when
    at = ring[node].leaf_at
    if at != 0:
        leaves[at - 1].kind = kind
        leaves[at - 1].when = when


@compiled
def oldest_leaf(ring, node):
    """The least recently used leaf that was used after `node`, or 0."""
    node = ring[node].newer
    while node != 0 and ring[node].leaf_at == 0:
        node = ring[node].newer
    return node


@compiled
def least_worth_leaf(ring, leaves, count, first, worth_of, clock, state):
    """Of some drawn leaves and one given leaf, the one worth least; of equals the least recently used."""
    found, when = first, ring[first].when
    least = worth_of[ring[first].kind, age_of(clock - when)]
    for _ in range(CANDIDATES // 2):
        state = next_state(state)
        for draw in (upper(state), lower(state)):
            at = below(draw, count)
            used = leaves[at].when
            worth = worth_of[leaves[at].kind, age_of(clock - used)]
            if worth < least or (worth == least and used < when):
                found, least, when = leaves[at].node, worth, used
    return found


# Names ---------------------------------------------------------------------------------------------------------------


@compiled
def _head(nodes, heads, name):
    """Where a name's chain begins. Node 0 has a random factor in place of a name, so that no client can aim at one
    chain."""
    return np.int64((np.uint64(name) * np.uint64(nodes[0].name)) >> np.uint64(32)) & (len(heads) - 1)


@compiled
def find(nodes, heads, name):
    """The node of a name, or 0."""
    node = heads[_head(nodes, heads, name)]
    while node != 0 and nodes[node].name != name:
        node = nodes[node].next
    return node


@compiled
def fetch(nodes, heads, names, numbers):
    """Prefetch everything that these names lead to, before it is needed one by one."""
    seen = 0
    for name in names:
        seen += heads[_head(nodes, heads, name)]
    for name in names:
        seen += nodes[heads[_head(nodes, heads, name)]].newer
    numbers[FETCHED] = seen


@compiled
def enter(nodes, heads, node, name):
    at = _head(nodes, heads, name)
    nodes[node].name = name
    nodes[node].next = heads[at]
    heads[at] = node


@compiled
def strike(nodes, heads, node):
    at = _head(nodes, heads, nodes[node].name)
    one = heads[at]
    if one == node:
        heads[at] = nodes[node].next
        return
    while nodes[one].next != node:
        one = nodes[one].next
    nodes[one].next = nodes[node].next


# Ghosts: told of each request, they store and evict names in place of blocks, each by its rule -----------------------


@compiled
def _ghost_insert(ghost, heads, leaves, which, name, parent, worth_of, clock, numbers):
    """A block comes, right behind its parent, and the ghost evicts for it, by its own rule. Returns its node, or 0 if
    only its ancestors could go. It is no leaf yet: most get a child at once."""
    if parent != 0:
        ghost[parent].children += 1
        if which == OWN:
            drop_leaf(ghost, leaves, parent, numbers, OWN + LEAF_COUNT)
    for _ in range(MOST_GO):
        if numbers[which + COUNT] < numbers[which + MOST]:
            break
        victim = ghost[0].newer
        if victim == 0 or ghost[victim].children != 0:
            break
        if which == OWN:
            numbers[OWN_DRAWS] += 1
            state = drawn_from(numbers[OWN_DRAWS])
            victim = least_worth_leaf(ghost, leaves, numbers[OWN + LEAF_COUNT], victim, worth_of, clock, state)
        _ghost_remove(ghost, heads, leaves, which, victim, numbers)
    if numbers[which + COUNT] + 1 >= len(ghost):
        if parent != 0:
            ghost[parent].children -= 1
        return 0
    node = numbers[which + FREE]
    if node != 0:
        numbers[which + FREE] = ghost[node].next
    else:
        node = numbers[which + COUNT] + 1
    numbers[which + COUNT] += 1
    enter(ghost, heads, node, name)
    ghost[node].parent = parent
    ghost[node].children = 0
    insert(ghost, node, parent)
    return node


@compiled
def _ghost_remove(ghost, heads, leaves, which, node, numbers):
    take_out(ghost, node)
    strike(ghost, heads, node)
    numbers[which + COUNT] -= 1
    parent = ghost[node].parent
    if parent != 0:
        ghost[parent].children -= 1
    if which == OWN:
        drop_leaf(ghost, leaves, node, numbers, OWN + LEAF_COUNT)
        if parent != 0 and ghost[parent].children == 0:
            add_leaf(ghost, leaves, parent, numbers, OWN + LEAF_COUNT)
    ghost[node].next = numbers[which + FREE]
    numbers[which + FREE] = node


@compiled
def tell(ghost, heads, leaves, which, request, told, most, worth_of, numbers):
    """Tell a ghost of a chain, from the prompt's first block on, up to so many more blocks. Each goes to the recent
    end, behind its parent: so no block is newer than its ancestors, and the oldest one is a leaf, or all are of this
    chain."""
    left, parent = numbers[which + LEFT], numbers[which + PARENT]
    if left == 0:
        return
    stop = max(0, left - most)
    fetch(ghost, heads, told[NAME, stop : min(left, request.count + 1)], numbers)
    reached = left
    while reached > stop:
        at = reached - 1
        node = find(ghost, heads, told[NAME, at])
        if node == 0:
            if at >= request.count:
                break  # evicted since it was asked for: its descendants cannot be stored
            node = _ghost_insert(ghost, heads, leaves, which, told[NAME, at], parent, worth_of, request.clock, numbers)
            if node == 0:
                break
        elif ghost[node].parent != parent:
            break  # another block has the same name
        else:
            move_behind(ghost, node, parent)
            if at < request.count:
                numbers[which + HITS] += 1
        if told[KIND, at] >= 0:
            mark(ghost, leaves, node, told[KIND, at], told[WHEN, at])
        parent = node
        reached = at
    if which == OWN and parent != 0 and ghost[parent].children == 0:
        add_leaf(ghost, leaves, parent, numbers, OWN + LEAF_COUNT)
    numbers[which + PARENT] = parent
    numbers[which + LEFT] = stop if reached == stop else 0


# Learning ------------------------------------------------------------------------------------------------------------


@compiled
def _remember(history, heads, name, is_last, learned, numbers):
    """Count one use at the block's age, and look at the ages of some others. Returns its node."""
    clock = numbers[CLOCK] + 1
    numbers[CLOCK] = clock
    node = find(history, heads, name)
    if node != 0:
        learned[USES, history[node].kind, age_of(clock - history[node].when)] += 1.0
        take_out(history, node)
    else:
        if numbers[NAMES + COUNT] == numbers[NAMES + MOST]:
            node = history[0].newer
            take_out(history, node)
            strike(history, heads, node)
        else:
            numbers[NAMES + COUNT] += 1
            node = numbers[NAMES + COUNT]
        enter(history, heads, node, name)
        history[node].uses = 0
    insert(history, node, 0)
    uses = min(history[node].uses + 1, 255)
    history[node].uses = uses
    history[node].when = clock
    history[node].kind = LEVEL * (0 if uses < 2 else 1 if uses < 4 else 2 if uses < 8 else 3) + is_last
    state = np.uint64(numbers[DRAWS])
    for _ in range(SAMPLES // 2):
        state = next_state(state)
        for draw in (upper(state), lower(state)):
            one = 1 + below(draw, numbers[NAMES + COUNT])
            learned[LOOKS, history[one].kind, age_of(clock - history[one].when)] += 1.0
    numbers[DRAWS] = np.int64(state)
    return node


@compiled
def _reckon(learned, kind, names, passed, half_life):
    """Compute a kind's worth at each age: the best, over all horizons, of the chance of a use to the time it takes.
    What was learned decays by the uses since the last time."""
    keeps, times = np.empty(AGES), np.empty(AGES)  # of a block at each age, until the next: the chance of no use, time
    per_look = names / SAMPLES  # a look stands for so many blocks that were that old for the time of one use
    for age in range(AGES):
        width = 1.0 if age < STEPS else 2.0 ** (age // STEPS - 1)
        rate = learned[USES, kind, age] / ((learned[LOOKS, kind, age] + DOUBT) * per_look)
        keeps[age] = np.exp(-rate * width)
        times[age] = (1.0 - keeps[age]) / rate if rate > 1e-15 else width
    for age in range(AGES):
        best, left, time = 0.0, 1.0, 0.0
        for later in range(age, AGES):
            time += left * times[later]
            left *= keeps[later]
            best = max(best, (1.0 - left) / time)
        learned[WORTH, kind, age] = best
    learned[:WORTH, kind] *= 0.5 ** (passed / half_life)


@compiled
def _fit(numbers):
    """Fit the ghosts' room to the tier's actual number of blocks, if blocks have another size than expected: the tier
    was full when a victim was asked for, except for what was about to come."""
    full, most = min(numbers[FULL], numbers[NODES]), numbers[ROOM]
    if full > most:
        most = full
    elif 0 < full < most - (most >> 3):
        most -= (most - full + 3) >> 2
    numbers[ROOM] = most
    numbers[FULL] = 0


@compiled
def _guard(scores, settings, count, lru_hits, own_hits, numbers):
    """Follow the learning ghost once it leads by more than some requests explain, until it falls behind. If both were
    equally good, each request's difference would fall on either side, and their sum be as large as the root of the sum
    of their squares; with decay it is 0.7 of that in the long run."""
    weight = scores[WEIGHT]
    scores[LRU_SCORE] += lru_hits * weight
    scores[OWN_SCORE] += own_hits * weight
    scores[SPREAD] += (own_hits - lru_hits) ** 2 * weight
    scores[SCORE_USES] += count * weight
    lead = scores[OWN_SCORE] - scores[LRU_SCORE]
    spread = np.sqrt(scores[SPREAD] * weight)
    leads = lead > settings[LEAD] * spread + settings[FLOOR] * scores[SCORE_USES]
    if (numbers[RULE] == 0 and leads) or (numbers[RULE] == 1 and lead < 0.0):
        numbers[RULE] = 1 - numbers[RULE]
    scores[WEIGHT] *= 2.0 ** min(count / settings[SCORE_HALF_LIFE], MOST_HALVINGS)
    if scores[WEIGHT] > 1e100:
        scores /= scores[WEIGHT]


@compiled
def _followed(events, stop, order, leaves, numbers):
    at = 0
    while at < stop:
        event, row = events[at] & ((1 << EVENT_BITS) - 1), events[at] >> EVENT_BITS
        node = row + 1
        at += 1
        if event == TOUCHED:
            at += row
            for one in events[at - row : at]:
                if order[one + 1].newer == 0 and order[0].older != one + 1:
                    return False
                move_behind(order, one + 1, 0)
            continue
        if (order[node].newer != 0 or order[0].older == node) == (event == INSERTED):
            return False
        if event == INSERTED:
            order[node].kind = 0
            order[node].when = numbers[CLOCK]
            numbers[SIZE] += 1
            insert(order, node, 0)
            add_leaf(order, leaves, node, numbers, LEAVES)
        elif event == REMOVED:
            numbers[SIZE] -= 1
            take_out(order, node)
            drop_leaf(order, leaves, node, numbers, LEAVES)
            order[node].newer = 0
        elif event == LEAF:
            add_leaf(order, leaves, node, numbers, LEAVES)
        else:
            drop_leaf(order, leaves, node, numbers, LEAVES)
    return True


# What adaptive calls -------------------------------------------------------------------------------------------------


def _follow(address, stop):
    """Apply events to the tier's own order, up to `stop`. False for an invalid one."""
    events, order, leaves, _, _, _, _, _, _, _, _, _, _, numbers, _, _ = arrays_at(address)
    return _followed(events, stop, order, leaves, numbers)


def _learn(address, stop, chain, count, names):
    """Apply events; then take in a request for a chain, deepest block first, of which the first `count` count as used.
    Of a long one some is learned and told now. Returns how many requests wait, or -1 for an invalid event."""
    events, order, leaves, _, _, _, _, _, _, _, requests, told, _, numbers, _, settings = arrays_at(address)
    if not _followed(events, stop, order, leaves, numbers):
        return -1
    if numbers[WAITING] == REQUESTS:
        _learn_waiting(address, STEP, names)
        left = max(numbers[LRU + LEFT], numbers[OWN + LEFT])
        _tell_ghosts(address, min(left if left != 0 else requests[numbers[FIRST]].length, STEP))
    if numbers[WAITING] != REQUESTS:
        last = (numbers[FIRST] + numbers[WAITING]) % REQUESTS
        numbers[WAITING] += 1
        requests[last].length, requests[last].count = len(chain), count
        blocks = told[last]
        for at in range(len(chain)):
            row = chain[at]
            blocks[NAME, at], blocks[KIND, at] = names[row], -1 - row
        _learn_waiting(address, np.int64(settings[MOST_LEARNED]), names)
        _tell_ghosts(address, np.int64(settings[MOST_AT_ONCE]) if count <= settings[MOST_AT_ONCE] else PIECE)
        if numbers[LEARNED] + (numbers[REACHED] != 0) >= numbers[WAITING]:
            return numbers[WAITING]
    _made_young(order, leaves, chain[0], numbers)
    return numbers[WAITING]


def _passed_over(address, stop, row):
    """Apply events; then take in a request for a block and its ancestors without learning. False for an invalid
    event."""
    events, order, leaves, _, _, _, _, _, _, _, _, _, _, numbers, _, _ = arrays_at(address)
    is_right = _followed(events, stop, order, leaves, numbers)
    if is_right:
        _made_young(order, leaves, row, numbers)
    return is_right


@compiled
def _made_young(order, leaves, row, numbers):
    """Only a leaf's current use is known."""
    node = row + 1
    mark(order, leaves, node, order[node].kind, numbers[CLOCK])


@compiled
def _learn_waiting(address, most, names):
    _, order, leaves, _, _, _, _, _, history, heads, requests, told, learned, numbers, _, settings = arrays_at(address)
    while numbers[LEARNED] != numbers[WAITING] and most > 0:
        this = (numbers[FIRST] + numbers[LEARNED]) % REQUESTS
        request, blocks = requests[this], told[this]
        begin = numbers[REACHED]
        if begin == 0:
            request.kind = -1
            if numbers[CLOCK] >= numbers[DUE]:  # one kind at a time, so that no request waits for all
                kind = numbers[TURN]
                passed = numbers[CLOCK] - numbers[RECKONED + kind]
                numbers[RECKONED + kind] = numbers[CLOCK]
                _reckon(learned, kind, numbers[NAMES + COUNT], passed, settings[HALF_LIFE])
                request.kind, request.worth[:] = kind, learned[WORTH, kind]
                if kind == 0:
                    _fit(numbers)
                numbers[TURN] = (kind + 1) % KINDS
                numbers[DUE] = max(numbers[DUE] + RECKON_USES // KINDS, numbers[CLOCK])
        counted = min(request.count + 1, request.length)
        stop = min(begin + most, counted)
        fetch(history, heads, blocks[NAME, begin:stop], numbers)
        for at in range(begin, stop):
            name = blocks[NAME, at]
            if at < request.count:
                node = _remember(history, heads, name, 1 if at == 0 else 0, learned, numbers)
            else:  # the end of what was found is not the request's end
                node = find(history, heads, name)
                if node != 0:
                    history[node].kind &= 255 - LAST
            if node != 0:
                row, kind, when = -1 - blocks[KIND, at], history[node].kind, history[node].when
                blocks[KIND, at], blocks[WHEN, at] = kind, when
                if names[row] == name:  # the row is this block's still
                    mark(order, leaves, row + 1, kind, when)
        most -= stop - begin
        numbers[REACHED] = stop
        if stop == counted:
            request.clock, request.room = numbers[CLOCK], numbers[ROOM]
            numbers[LEARNED] += 1
            numbers[REACHED] = 0


@compiled
def _tell_ghosts(address, most):
    """Tell the ghosts up to so many more blocks of the learned requests. Hits count once both know all of a request.
    Returns how many wait."""
    all_arrays = arrays_at(address)
    _, _, _, lru, lru_heads, own, own_heads, leaves, _, _, requests, told, learned, numbers, scores, settings = (
        all_arrays
    )
    while numbers[LEARNED] != 0 and most > 0:
        request, blocks = requests[numbers[FIRST]], told[numbers[FIRST]]
        if numbers[LRU + LEFT] == 0 and numbers[OWN + LEFT] == 0:
            for which in (LRU, OWN):
                numbers[which + MOST] = request.room
                numbers[which + LEFT], numbers[which + PARENT], numbers[which + HITS] = request.length, 0, 0
            if request.kind >= 0:
                learned[GHOST_WORTH, request.kind] = request.worth
        left = max(numbers[LRU + LEFT], numbers[OWN + LEFT])
        tell(lru, lru_heads, leaves, LRU, request, blocks, most, learned[GHOST_WORTH], numbers)
        tell(own, own_heads, leaves, OWN, request, blocks, most, learned[GHOST_WORTH], numbers)
        more = max(numbers[LRU + LEFT], numbers[OWN + LEFT])
        most -= left - more
        if more == 0:
            _guard(scores, settings, request.count, numbers[LRU + HITS], numbers[OWN + HITS], numbers)
            numbers[LEARNED] -= 1
            numbers[WAITING] -= 1
            numbers[FIRST] = (numbers[FIRST] + 1) % REQUESTS if numbers[WAITING] != 0 else 0  # prefetched earlier
    return numbers[WAITING]


def _catch_up(address, stop, most, names):
    """Apply events; then learn, and tell the ghosts, up to so many more blocks each. Returns how many requests wait, or
    -1 for an invalid event."""
    events, order, leaves, _, _, _, _, _, _, _, _, _, _, numbers, _, _ = arrays_at(address)
    if not _followed(events, stop, order, leaves, numbers):
        return -1
    _learn_waiting(address, most, names)
    return _tell_ghosts(address, most)


def _first_victim(address, stop, draw):
    """Apply events; then the leaf that goes first, the same for the same draw until something changes. 0 without any,
    -1 for an invalid event."""
    events, order, leaves, _, _, _, _, _, _, _, _, _, learned, numbers, _, _ = arrays_at(address)
    if not _followed(events, stop, order, leaves, numbers):
        return -1
    numbers[FULL] = max(numbers[FULL], numbers[SIZE])
    first = oldest_leaf(order, 0)
    if first == 0 or numbers[RULE] == 0:
        return first
    return least_worth_leaf(order, leaves, numbers[LEAVES], first, learned[WORTH], numbers[CLOCK], drawn_from(draw + 1))


def _next_leaf(address, node):
    return oldest_leaf(arrays_at(address)[1], node)


def _enter_all(nodes, heads):
    node = nodes[0].newer
    while node != 0:
        enter(nodes, heads, node, nodes[node].name)
        node = nodes[node].newer


def _compile(loops: AdaptiveLoops) -> None:
    address, rows, names = int64, int32[::1], int64[::1]
    loops.follow.compile((address, int64))
    loops.learn.compile((address, int64, rows, int64, names))
    loops.passed_over.compile((address, int64, int64))
    loops.catch_up.compile((address, int64, int64, names))
    loops.first_victim.compile((address, int64, int64))
    loops.next_leaf.compile((address, int64))
    for dtype in (GHOST, HISTORY):
        loops.enter_all.compile((from_dtype(dtype)[::1], rows))
    for loop in loops:
        loop.disable_compile()  # anything else is an error: `None` for an address would be address 0


_ready: AdaptiveLoops | None = None
