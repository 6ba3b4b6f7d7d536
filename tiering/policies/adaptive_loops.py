"""The adaptive policy's per-block work, compiled by numba. `adaptive` explains what and why.

The functions of `AdaptiveLoops` are its entrances: the first `prepare` compiles them, with all that they call here, in
`adaptive_ghosts` and in `adaptive_rings`. All state is arrays (`adaptive_arrays`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from hashlib import blake2b
from logging import getLogger
from typing import Any, NamedTuple

import numpy as np
from numba import config, from_dtype, int32, int64, njit

from tiering.policies import adaptive_arrays, adaptive_ghosts, adaptive_rings
from tiering.policies.adaptive_arrays import (
    AGES,
    CLOCK,
    COUNT,
    DOUBT,
    DRAWS,
    DUE,
    EVENT_BITS,
    FIRST,
    FLOOR,
    FULL,
    GHOST,
    GHOST_WORTH,
    HALF_LIFE,
    HISTORY,
    HITS,
    INSERTED,
    KIND,
    KINDS,
    LAST,
    LEAD,
    LEAF,
    LEARNED,
    LEAVES,
    LEFT,
    LEVEL,
    LOOKS,
    LRU,
    LRU_SCORE,
    MOST,
    MOST_AT_ONCE,
    MOST_HALVINGS,
    MOST_LEARNED,
    NAME,
    NAMES,
    NODES,
    OWN,
    OWN_SCORE,
    PARENT,
    PIECE,
    REACHED,
    RECKON_USES,
    RECKONED,
    REMOVED,
    REQUESTS,
    ROOM,
    RULE,
    SAMPLES,
    SCORE_HALF_LIFE,
    SCORE_USES,
    SIZE,
    SPREAD,
    STEP,
    STEPS,
    TOUCHED,
    TURN,
    USES,
    WAITING,
    WEIGHT,
    WHEN,
    WORTH,
    arrays_at,
    compiled,
)
from tiering.policies.adaptive_ghosts import tell
from tiering.policies.adaptive_rings import (
    add_leaf,
    age_of,
    below,
    drawn_from,
    drop_leaf,
    enter,
    fetch,
    find,
    insert,
    least_worth_leaf,
    lower,
    mark,
    move_behind,
    next_state,
    oldest_leaf,
    strike,
    take_out,
    upper,
)

_log = getLogger(__name__)


class AdaptiveLoops(NamedTuple):
    """The functions that `adaptive` calls."""

    follow: Any
    learn: Any
    passed_over: Any
    catch_up: Any
    first_victim: Any
    next_leaf: Any
    enter_all: Any


_ENTRANCES = ("_follow", "_learn", "_passed_over", "_catch_up", "_first_victim", "_next_leaf", "_enter_all")


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
        entrances = [globals()[name] for name in _ENTRANCES]
        if cache:
            _name_by_source(entrances)
        loops = AdaptiveLoops(*(njit(nogil=True, cache=cache)(entrance) for entrance in entrances))
        _compile(loops)
    except Exception as error:  # of a disk, of whatever damaged bytes make, or of a compiler that is somebody else's
        raise NotCompiled(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from error
    return loops


def _name_by_source(entrances: list[Callable[..., Any]]) -> None:
    """Numba finds what it kept by the function's name, and checks the text of the function's own file. The name says
    which text the other files had."""
    text = "".join(inspect.getsource(module) for module in (adaptive_arrays, adaptive_ghosts, adaptive_rings))
    digest = blake2b(text.encode(), digest_size=8).hexdigest()
    for entrance in entrances:
        entrance.__qualname__ = f"{entrance.__name__}_{digest}"


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
