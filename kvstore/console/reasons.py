"""Each miss reason in words: meaning, usual cause, and what an operator can do. Pure text.

Covers every `MissReason`, as a test checks. docs/dashboard.md has the same words, each at its reason's anchor.
"""

from __future__ import annotations

import msgspec

from kvstore.block.account import MissReason


class ReasonText(msgspec.Struct, frozen=True):
    """One sentence each. is_fine: needs no action, however frequent."""

    meaning: str
    cause: str
    remedy: str
    is_fine: bool = False


REASONS: dict[MissReason, ReasonText] = {
    MissReason.ABSENT: ReasonText(
        "The store has never seen this prefix, or forgot it so long ago that nothing is known of it.",
        "New prompts. Or prompts that begin with something that differs each time: a date, a user's name, an id.",
        "Put what changes behind what stays the same. If prompts do repeat, see whether they are evicted first.",
    ),
    MissReason.EVICTED: ReasonText(
        "The prefix was stored, and had to make room for other blocks.",
        "The working set is larger than the tiers.",
        "Give the sidecar more dram or nvme; a shared system prompt can be kept with a ttl or a priority.",
    ),
    MissReason.DIVERGED: ReasonText(
        "The prompt begins as a stored one does, and goes on in another way.",
        "Many prompts behind one system prompt: this is where each becomes itself.",
        "Nothing, where the difference is the user's own text. Else look for a value that changes too early.",
    ),
    MissReason.OTHER_NAMESPACE: ReasonText(
        "The prompt is stored, but for another model, layout or codec.",
        "Engines with different settings: another dtype, tensor-parallel size, block size, codec or weights.",
        "Run the engines with the same settings if they should share. The page Tenants lists the namespaces.",
    ),
    MissReason.PARTIAL_BLOCK: ReasonText(
        "The prompt's tail, which fills no block; only whole blocks are stored.",
        "Nearly every prompt has one; if it fills its blocks, its last token is computed instead (last_token).",
        "Nothing.",
        True,
    ),
    MissReason.LAST_TOKEN: ReasonText(
        "An engine has to compute at least one token of each prompt.",
        "The whole prompt was found.",
        "Nothing.",
        True,
    ),
    MissReason.GRID: ReasonText(
        "Tokens that are computed so that a hit computes the same shapes as a miss.",
        "The engine's adapter cuts prompts on a grid of fixed chunks, so that shapes do not change an answer.",
        "Nothing.",
        True,
    ),
    MissReason.WARMING: ReasonText(
        "The store was not ready yet: it is taking in what is on disk, or a namespace is being opened.",
        "The sidecar began again, or an engine did.",
        "Wait; a line above says how far it is. If it takes long, look at the speed of the disk.",
    ),
    MissReason.IN_FLIGHT: ReasonText(
        "Another request was storing the same blocks at that moment.",
        "Requests with one prefix came at once.",
        "Nothing; the next ones find it, and a put stores what only it has behind it.",
        True,
    ),
    MissReason.PINNED_FULL: ReasonText(
        "All that may be pinned at once is pinned by leases.",
        "Many long prompts are loaded at a time, or an engine holds its leases for too long.",
        "Give the sidecar more dram, or let the engine run fewer requests at once.",
    ),
    MissReason.DEADLINE: ReasonText(
        "The blocks, or the room for them, did not come before the engine's deadline.",
        "The disk is slow or busy.",
        "Look at the waiting moves on the page Moves and disk; give more dram, or a longer deadline.",
    ),
    MissReason.TIER_DOWN: ReasonText(
        "The tier that holds the blocks does not answer.",
        "The disk fails or hangs.",
        "Look at the health line and at the sidecar's log; replace the disk if it reports errors.",
    ),
    MissReason.UNREACHABLE: ReasonText(
        "The store itself did not answer.",
        "The sidecar was away or overloaded.",
        "Look at the page Events for when it was away, and at its log.",
    ),
    MissReason.CORRUPT: ReasonText(
        "A check failed, so the bytes were not used; the frame is quarantined and never served again.",
        "Bad memory, a bad disk, or a process that wrote where it must not.",
        "Test the machine's memory and disk. kvstore fsck checks the directory while no process uses it.",
    ),
    MissReason.KEY_MISMATCH: ReasonText(
        "The blocks were written under a key that this store does not hold.",
        "A directory was copied without its keys, a tenant was purged, an epoch retired, or its engine has other keys.",
        "Bring the keys along, or let the blocks be replaced; kvstore stat warns of engines that have other keys.",
    ),
    MissReason.STALE_HINT: ReasonText(
        "The blocks were said to be there, and were not any more.",
        "They were evicted between a look-up and its load.",
        "Nothing, as long as it is rare. Else give the sidecar more room.",
    ),
    MissReason.QUOTA: ReasonText(
        "The tenant has reached its limit, or the prompt alone takes more than it may have.",
        "Shares of memory or disk are set, and others hold theirs.",
        "Raise the tenant's share or weight, or the budget of the tier.",
    ),
    MissReason.NOT_ADMITTED: ReasonText(
        "The policy chose not to keep the blocks.",
        "It expects that they are not asked for again, or the disk's write budget is spent.",
        "Raise store.nvme_writes if the drive can take more; else nothing.",
    ),
    MissReason.CHEAPER_TO_COMPUTE: ReasonText(
        "The engine expected that loading takes longer than computing.",
        "The prefix is short, or lies on a slow disk.",
        "Nothing; a faster disk or more dram makes loading pay more often.",
        True,
    ),
    MissReason.AUDIT: ReasonText(
        "Computed on purpose, to compare it with what is stored.",
        "An engine's first two hits are checked this way, and one in a thousand after them.",
        "Nothing.",
        True,
    ),
    MissReason.UNSUPPORTED: ReasonText(
        "The engine or the model cannot take it.",
        "An option of the engine, an adapter, or inputs that are not text.",
        "See what the engine's log says about the store.",
    ),
    MissReason.DISABLED: ReasonText(
        "Nothing was asked: the store is closed or not used, or the namespace was dropped.",
        "An operator's drop or purge, or an engine that is ending.",
        "Nothing.",
        True,
    ),
    MissReason.NONFINITE: ReasonText(
        "Not stored: the numbers hold a NaN or an infinity.",
        "The model overflows in this dtype.",
        "Check the model's dtype and weights: its answers are in doubt too.",
    ),
    MissReason.OUT_OF_RANGE: ReasonText(
        "Not stored: the numbers are too far apart for the codec's scales.",
        "A model with extreme values, in an 8-bit codec.",
        "Use the codec raw for this model.",
    ),
    MissReason.INCOMPLETE: ReasonText(
        "Not stored: pages of one of its groups were gone already.",
        "A model with a sliding window.",
        "Nothing; the engine stores such prompts in pieces.",
        True,
    ),
    MissReason.BUSY: ReasonText(
        "As much is under way for the asker as may be.",
        "A burst of requests, or an engine that floods the sidecar.",
        "Nothing, as long as it is rare. Else look at the waits on the page Engines.",
    ),
}
