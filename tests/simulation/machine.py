"""A machine with a disk for an NVMe tier, which can be switched off at any effect, and what it owes its users."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from simulation.disk import SimulatedFiles
from simulation.index import SimulatedIndex
from simulation.power import Power
from tiering.errors import BlockCorrupt
from tiering.frame import HEADER_BYTES, FrameHeader, MacKeys, Sealer, Stamp, digest, open_header, verify_payload
from tiering.nvme.frame_index import FrameIndex
from tiering.nvme.slab_recovery import Found
from tiering.nvme.tier import NvmeTier
from tiering.slab_header import SlabSizes
from tiering.tier import SlotClass

MAC_KEY = bytes(range(32))
PAYLOAD_BYTES = 4096
SLAB_BYTES = 2 * 4096 + 40 * 8192  # more slots than one record of the index has


class OneKey:
    """`MacKeys` of a store with one tenant."""

    def mac_key(self, tenant: bytes, key_id: bytes, epoch: int) -> bytes | None:
        return MAC_KEY

    slab_key = mac_key


class Keys:
    """`MacKeys` of a store with two tenants, one key and one epoch, as a key ring has them; some may be away."""

    def __init__(self, *absent: bytes) -> None:
        self.absent = absent

    def mac_key(self, tenant: bytes, key_id: bytes, epoch: int) -> bytes | None:
        if tenant in self.absent or key_id != b"key-id-0" or epoch != 1:
            return None
        return {b"t" * 16: MAC_KEY, b"u" * 16: MAC_KEY}.get(tenant)

    slab_key = mac_key


def stamp_of(part: int) -> Stamp:
    return Stamp(b"key-id-0", 1, b"t" * 16, b"n" * 32, "raw", part, 2, 64, 1, PAYLOAD_BYTES)


STAMPS = [stamp_of(part) for part in range(2)]
CLASSES = [SlotClass(one.tenant, one.namespace, one.part, one.frame_bytes) for one in STAMPS]
SEALERS = [Sealer(one, MAC_KEY) for one in STAMPS]


class Frame:
    """A frame as it was stored: its bytes, and by what it is known."""

    def __init__(self, part: int, key: bytes, generation: int, random: Random) -> None:
        self.part, self.key, self.generation = part, key, generation
        payload = random.randbytes(PAYLOAD_BYTES)
        header = SEALERS[part].seal(key, bytes(32), 0, generation, [digest(payload)])
        self.bytes = header + payload

    @property
    def name(self) -> tuple[int, bytes, int]:
        """Part, key and generation."""
        return self.part, self.key, self.generation


class Machine:
    """Files and an index on one supply of power, and the tier that runs on them."""

    def __init__(self, budget_bytes: int = 6 * SLAB_BYTES) -> None:
        self.power = Power()
        self.files = SimulatedFiles(self.power)
        self.index = SimulatedIndex(self.power)
        self.budget_bytes = budget_bytes
        self.uids = 0
        self.tier: NvmeTier | None = None

    # `IndexMaker`

    def open(self, *, clean: bool) -> FrameIndex:
        self.index.reopen()
        return self.index

    def discard(self) -> None:
        self.index = SimulatedIndex(self.power)

    # A person with a finger on the switch

    def start(self, make: Callable[..., NvmeTier] = NvmeTier, keys: MacKeys | None = None) -> list[Found]:
        """Open the directory and load all of it."""
        self.tier = make(self.files, self, keys or OneKey(), SlabSizes(self.budget_bytes, SLAB_BYTES), self.new_uid)
        return list(self.tier.load())

    def stop(self) -> None:
        """In order."""
        assert self.tier is not None
        self.tier.close()
        self.tier = None
        self.files.reopen()

    def lose_power(self, random: Random, *, index_too: bool = False) -> None:
        """The lights went out; they come back on."""
        self.tier = None
        self.files.crash(random)
        self.index.crash(random)
        if index_too:
            self.discard()
        self.power.back()

    def copy(self, kind: type[Machine] | None = None) -> Machine:
        """The same disk once more, the tier not started."""
        twin = (kind or Machine)(self.budget_bytes)
        twin.files, twin.index = self.files.copy(), self.index.copy()
        twin.files.power = twin.index.power = twin.power
        twin.uids = 1000
        return twin

    def new_uid(self) -> bytes:
        self.uids += 1
        return self.uids.to_bytes(16, "big")

    def read(self, place: int) -> FrameHeader | None:
        """The frame at a place if it verifies in every respect."""
        assert self.tier is not None
        frame = bytearray(HEADER_BYTES + PAYLOAD_BYTES)
        self.tier.read(place, memoryview(frame))
        try:
            header = open_header(bytes(frame[:HEADER_BYTES]), OneKey())
            verify_payload(header, memoryview(frame)[HEADER_BYTES:])
        except BlockCorrupt:
            return None
        return header
