"""The adaptive policy's ghosts: told of each request, they store and evict names in place of blocks, each by its rule.

All of it is compiled with what calls it.
"""

from __future__ import annotations

from tiering.policies.adaptive_arrays import (
    COUNT,
    FREE,
    HITS,
    KIND,
    LEAF_COUNT,
    LEFT,
    MOST,
    MOST_GO,
    NAME,
    OWN,
    OWN_DRAWS,
    PARENT,
    WHEN,
    compiled,
)
from tiering.policies.adaptive_rings import (
    add_leaf,
    drawn_from,
    drop_leaf,
    enter,
    fetch,
    find,
    insert,
    least_worth_leaf,
    mark,
    move_behind,
    strike,
    take_out,
)


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
