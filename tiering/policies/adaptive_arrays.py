"""The arrays of the adaptive policy: what they hold, at which place, and where compiled code finds them.

`adaptive` makes and keeps them. A call costs more with each array argument, and most take less than a microsecond: so a
call gets a single address, of an array that says where they are (`Arrays`).

    order     blocks of the tier: a ring in the order of their last use
    ghost     the same of names in place of blocks, with the tree over them
    leaves    of the tier and of the learning ghost, in no order
    history   names in the order of their last use
    requests  not yet fully learned and told to the ghosts, oldest first, and what is known of them

Node 0 is a ring's two ends, and row r is node r + 1, so that zeroed memory is empty. Names are looked up by hash in
chains of nodes, which `heads` begin: with few heads that is slow, and never wrong.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import carray, njit, types
from numba.extending import intrinsic

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
"""Of code that the entrances in `adaptive_loops` call: compiled together with them."""


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
