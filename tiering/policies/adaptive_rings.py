"""Rings in the order of last use, draws among their leaves, and names found by hash: the adaptive policy's structures.

All of it is compiled with what calls it.
"""

from __future__ import annotations

import numpy as np
from numba import types
from numba.extending import intrinsic

from tiering.policies.adaptive_arrays import AGES, CANDIDATES, FETCHED, STEPS, compiled


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
