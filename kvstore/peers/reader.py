"""A puller's side of the protocol, over any transport: asks ahead, expects each record byte for byte, and checks.

The other side chooses no length and no allocation here: a frame's record must be exactly the expected one, or the
connection ends.
"""

from __future__ import annotations

import hmac
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from kvstore.block.errors import BadInput
from kvstore.peers import sealed
from kvstore.peers import transport as t
from kvstore.peers.tokens import hello_for, proof_of
from tiering.clock import Clock
from tiering.errors import BlockCorrupt
from tiering.frame import HEADER_BYTES, FrameHeader, names_block, parse_header, verify_payload

Check = Callable[[int, memoryview], bool]
Opening = Callable[[], bool]
"""Opens a sealed frame; returns whether its tag is right."""


class FramePuller(ABC):
    """A puller's connection, for one offer, over the transport's methods below. Of one thread at a time. is_refused:
    whether the holder has no such offer."""

    breaks: tuple[type[Exception], ...] = (OSError,)
    """Exceptions of these methods that mean a broken connection, besides `PullFault`."""

    def __init__(self, offer: t.PullOffer, secret: bytes, seal: sealed.FrameSeal | None, clock: Clock) -> None:
        self._offer, self._secret, self._seal, self._clock = offer, secret, seal, clock
        self._hello = hello_for(offer.token, secret, offer.is_sealed)
        self._record = memoryview(bytearray(t.RECORD.size))
        self._checker = ThreadPoolExecutor(1, "kvstore-pull-checks")
        self.is_refused = self._is_welcome = self._is_over = self._has_wrong = False
        self._number = 0  # of the next frame
        self._request = 0
        self._expected: deque[bytes] = deque()  # records of requested frames

    @abstractmethod
    def _write(self, said: bytes, deadline: float) -> None: ...

    @abstractmethod
    def _fill(self, view: memoryview, deadline: float) -> None: ...

    @abstractmethod
    def _fill_slot(self, record: bytes, view: memoryview, deadline: float) -> Opening | None:
        """Read the bytes after a frame's record into its slot; returns what opens them in place, if sealed."""

    def _expect(self, number: int, views: Sequence[memoryview]) -> None:  # noqa: B027  # most have nothing to do
        """These slots are requested, from that frame on."""

    @abstractmethod
    def _hang_up(self) -> None: ...

    def greet(self, deadline: float) -> None:
        """Name the offer. The answer is read with the first frames, which saves a round trip."""
        try:
            self._write(self._hello, deadline)
        except self.breaks as error:
            raise broken(error) from None

    @abstractmethod
    def free_slots(self, when_free: Callable[[], None]) -> bool:
        """Whether no slot of this connection can be written any more, after a fault too. If not, `when_free` is called
        once they are free, from another thread; slots must not be reused before."""

    def pull(self, slots: Sequence[memoryview], check: Check, deadline: float) -> int:
        """Read the next frames of the offer into slots, a slot each. Returns how many leading ones are whole and
        checked; fewer than `slots`: none of a refused offer (`is_refused`), or all that were offered.

        check: given a slot's place in `slots` and its bytes, whether this is the frame that belongs there; see
        `FrameChecks`. It is called from another thread. deadline: monotonic seconds. Raises `PeerFault` and
        `TimedOutPull`, with the number in `verified`: the connection is over then, and slots behind that number may
        contain anything.
        """
        if self.is_refused:
            return 0
        if self._is_over:
            raise t.PeerFault("the connection is over")
        views = [t.as_bytes(slot) for slot in slots[: self._offer.frames - self._number]]
        sizes = self._offer.frame_bytes
        for at, view in enumerate(views, self._number):
            if view.nbytes != sizes[at % len(sizes)]:
                raise BadInput(f"a slot of {view.nbytes} bytes for a frame of {sizes[at % len(sizes)]}")
        checks, is_well = list[Future[bool]](), False
        try:
            fault: t.PullFault | None = None
            try:
                self._read_frames(views, check, checks, deadline)
            except t.PullFault as found:
                fault = found
            except self.breaks as error:
                fault = broken(error)
            results = [one.result() for one in checks]
            verified = results.index(False) if False in results else len(results)
            if fault is None and False in results:
                fault = t.PeerFault("a frame that is not what was asked for")
            if fault is not None:
                fault.verified = verified
                raise fault
            is_well = not self.is_refused
        finally:
            if not is_well:
                self.close()
        return verified

    def close(self) -> None:
        """End it, from any thread; a running pull raises `PeerFault`."""
        self._is_over = True
        self._hang_up()
        self._checker.shutdown(wait=False)

    # --- frames ---

    def _read_frames(
        self, views: Sequence[memoryview], check: Check, checks: list[Future[bool]], deadline: float
    ) -> None:
        """Another thread opens and checks a frame while the next one arrives."""

        def is_right(at: int, view: memoryview, opening: Opening | None) -> bool:
            found = (opening is None or opening()) and check(at, view)
            self._has_wrong |= not found
            return found

        asked = 0
        for at, view in enumerate(views):
            while asked < len(views) and asked - at <= t.FRAMES_ASKED * (t.REQUESTS_UNDER_WAY - 1):
                asked += self._ask(views[asked : asked + t.FRAMES_ASKED], deadline)
            if not self._is_welcome and not self.hear_welcome(deadline):
                return
            self._fill(self._record, deadline)
            expected = self._expected.popleft()
            if self._record != expected:
                record = t.checked_record(self._record, t.FRAME_MAGIC)
                raise t.PeerFault(f"an answer to another request, or of another frame or size ({record.status})")
            opening = self._fill_slot(expected, view, deadline)
            self._number += 1
            try:
                checks.append(self._checker.submit(is_right, at, view, opening))
            except RuntimeError:
                raise t.PeerFault("the connection was closed from here") from None
            if self._has_wrong:
                return

    def _ask(self, views: Sequence[memoryview], deadline: float) -> int:
        number, count = self._number + len(self._expected), len(views)
        record = t.RECORD.pack(t.ASK_MAGIC, t.VERSION, 0, count, self._request, number, 0)
        tag = self._seal.tag(sealed.ASKED, self._request, record) if self._seal is not None else b""
        for at, view in enumerate(views):
            fields = (t.VERSION, t.PullStatus.FRAME, count - at - 1, self._request, number + at, view.nbytes)
            self._expected.append(t.RECORD.pack(t.FRAME_MAGIC, *fields))
        self._request += 1
        self._expect(number, views)
        self._write(record + tag, deadline)
        return count

    def hear_welcome(self, deadline: float) -> bool:
        """Whether it may pull; otherwise `is_refused` is set."""
        self._fill(self._record, deadline)
        record = t.checked_record(self._record, t.FRAME_MAGIC)
        if record[3:] != (0, 0, 0, 0) or record.status not in (t.PullStatus.WELCOME, t.PullStatus.REFUSED):
            raise t.PeerFault(f"an answer that is none to a greeting ({record.status})")
        if record.status == t.PullStatus.REFUSED:
            self.is_refused = True
            return False
        proof = bytearray(t.PROOF_BYTES)
        self._fill(memoryview(proof), deadline)
        if not hmac.compare_digest(proof, proof_of(self._hello, self._secret)):
            raise t.PeerFault("a door that does not have the secret of this pull")
        self._is_welcome = True
        return True


class PullTransport(ABC):
    """A way to pull frames."""

    name: str

    def __init__(self, clock: Clock, *, seal: str = "auto") -> None:
        """seal: as in the data server."""
        self._clock, self._seal = clock, seal

    def connect(self, offer: t.PullOffer, secret: bytes, deadline: float) -> FramePuller:
        """Raises `PeerFault`, `TimedOutPull`, and `BadInput` if this side lacks something that the offer needs."""
        seal = sealed.seal_of(offer, secret, self._seal)
        if self._clock.monotonic_seconds() >= deadline:
            raise t.TimedOutPull(f"no time is left to connect to {offer.address}")
        reader = self._dialled(offer, secret, seal, deadline)
        try:
            reader.greet(deadline)
        except BaseException:
            reader.close()
            raise
        return reader

    @abstractmethod
    def _dialled(
        self, offer: t.PullOffer, secret: bytes, seal: sealed.FrameSeal | None, deadline: float
    ) -> FramePuller: ...


def broken(error: Exception) -> t.PeerFault:
    """The fault for an error of the system, or of a library."""
    return t.PeerFault(f"the connection broke: {getattr(error, 'strerror', None) or error}")


class FrameCheck:
    """Of one frame, while it arrives: slot class, block and part, and every digest of its payload. A layer slice is
    compared as soon as it is whole, while the processor's caches still have it. Not thread-safe."""

    def __init__(self, stamp: bytes, key: bytes, frame: memoryview) -> None:
        """stamp: of the slot class, packed. key: of the block. frame: the memory in which it arrives."""
        self._stamp, self._key, self._frame = stamp, key, frame
        self._header: FrameHeader | None = None
        self._compared = 0
        self._is_wrong = False

    @property
    def is_right(self) -> bool:
        """Whether header and payload have arrived, and are what they should be."""
        return self._header is not None and self._compared == self._header.stamp.slices

    def arrived(self, count: int) -> None:
        """The first `count` bytes are there, and stay as they are. Never raises."""
        if self._header is None and not self._is_wrong and count >= HEADER_BYTES:
            self._read_header()
        if self._header is None or self._is_wrong:
            return
        stamp = self._header.stamp
        whole = min(stamp.slices, (count - HEADER_BYTES) // stamp.slice_bytes)
        try:
            verify_payload(self._header, self._frame[HEADER_BYTES:], self._compared, whole)
        except BlockCorrupt:
            self._is_wrong = True
        else:
            self._compared = whole

    def _read_header(self) -> None:
        raw = bytes(self._frame[:HEADER_BYTES])
        try:
            if names_block(raw, self._stamp, self._key):
                self._header = parse_header(raw)
        except BlockCorrupt:
            pass
        self._is_wrong = self._header is None


class FrameChecks:
    """The `check` of a pull, for the frames of several blocks.

    stamps: packed, by part, as the sidecar grants them. keys: of the blocks that the slots of this call are for, in
    order. The sidecar checks the header's MAC, for which it alone has the key.
    """

    def __init__(self, stamps: Sequence[bytes], keys: Sequence[bytes]) -> None:
        self._stamps, self._keys = stamps, keys

    def of(self, number: int, frame: memoryview) -> FrameCheck:
        """Of a frame that is to arrive. number: of a frame of these blocks, in the order of an offer."""
        block, part = divmod(number, len(self._stamps))
        return FrameCheck(self._stamps[part], self._keys[block], frame)

    def __call__(self, number: int, frame: memoryview) -> bool:
        """Whether a frame that has arrived is what it should be."""
        check = self.of(number, frame)
        check.arrived(len(frame))
        return check.is_right
