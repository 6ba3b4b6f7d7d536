"""The session of a directory: begun, raised and ended in the stamp, which says how the directory was left.

    left in order > in use, by a new stamp > the session begins: one more than the last > ends in order, or not at all

A session that has no end in the stamp was cut short, and the next start is careful with what it finds. Session numbers
rise durably: numbers made from them are never used twice.
"""

from __future__ import annotations

from dataclasses import replace

from tiering.errors import TierUnavailable
from tiering.nvme.index_records import IndexRecords
from tiering.nvme.slab import STAMP_PAGES, STAMP_SLAB, StoreStamp, latest_stamp, slab_name
from tiering.nvme.slab_files import Files, read_page
from tiering.slab_header import PAGE_BYTES

_NAME = slab_name(STAMP_SLAB)


def take_up(files: Files) -> StoreStamp | None:
    """The newest whole stamp, as the last session left it; from now on the directory counts as in use. A directory
    without slabs gets its first stamp with the session. Raises `OtherFormat`."""
    if _NAME not in files.sizes():
        return None
    pages = [read_page(files, _NAME, page * PAGE_BYTES) for page in range(STAMP_PAGES)]
    last = latest_stamp(pages)
    if last is not None and latest_stamp(pages, besides=last) is None:
        last = replace(last, session=last.session + 1)  # the page that is not whole may have been a later session's
    if last is not None and last.clean:
        # A file that rotted since may end this process when it is mapped; the next start has to be careful.
        _put(files, replace(last, sequence=last.sequence + 1, clean=False))
    return last


class StoreSession:
    """The session that is under way."""

    def __init__(self, files: Files, last: StoreStamp | None, records: IndexRecords) -> None:
        """Begins it. last: as `take_up` returned it. A new index gets its uid."""
        self._files = files
        self._records = records
        if _NAME not in files.sizes():
            files.create(_NAME, STAMP_PAGES * PAGE_BYTES)
        if last is None:  # so that the first of a directory whose stamps are gone is the newest there
            last = StoreStamp(0, 0, records.uid, 0, clean=False)
        elif last.clean:
            last = replace(last, sequence=last.sequence + 1)
        uid, changes = records.uid, records.changes
        self._stamp = last.next(index_uid=uid, changes=changes, clean=False, session=last.session + 1)
        _put(files, self._stamp)
        if not records.changes and not records.is_rebuilding:
            records.write([])

    @property
    def number(self) -> int:
        """At least the number of times this directory was opened; durable, so numbers made from it are never used
        twice."""
        return self._stamp.session

    def raise_to(self, session: int) -> None:
        """Frames to be written here are of that session, or of an earlier one: the next session is above it, durably
        when this returns. Raises `TierUnavailable`."""
        stamp = self._stamp
        stamp = stamp.next(index_uid=self._records.uid, changes=stamp.changes, clean=False, session=session)
        try:
            _put(self._files, stamp)
        except OSError as error:
            raise TierUnavailable(f"the directory cannot be written: {error}") from error
        self._stamp = stamp

    def end(self, *, clean: bool) -> None:
        """clean: all was recovered, and what was begun is finished."""
        records = self._records
        self._stamp = self._stamp.next(index_uid=records.uid, changes=records.changes, clean=clean)
        _put(self._files, self._stamp)


def _put(files: Files, stamp: StoreStamp) -> None:
    files.write(_NAME, stamp.page * PAGE_BYTES, memoryview(stamp.pack()))
    files.sync(_NAME)
