"""Finds what SQLite threw away when it recovered its write-ahead log after a crash.

SQLite silently ignores everything after the last intact commit of its ``-wal`` file. Frames that belong to
the current run of the file (same salt) but lie behind that commit are a torn tail; frames with another salt
are ordinary leftovers of an earlier run. Only the ``-wal`` file may be opened here: closing a handle of the
database file or of ``-shm`` would drop the locks that SQLite holds on them in this process.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

_HEADER = struct.Struct(">8I")  # magic, version, page size, checkpoint, salt, salt, checksum, checksum
_FRAME = struct.Struct(
    ">6I"
)  # page, size of the database if it ends a commit, salt, salt, checksum, checksum
_MAGIC = {0x377F0682: "<6I", 0x377F0683: ">6I"}
"""The magic number tells the byte order of the checksums."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WalPicture:
    """The frames of a write-ahead log as they lie in the file, valid or not."""

    salt: tuple[int, int] | None
    """None if the file's header is damaged, in which case SQLite ignores all of it."""
    frames: tuple[tuple[tuple[int, int], bool], ...]
    """(salt, whether it ends a commit) of every whole frame."""
    frame_size: int
    size: int

    def torn(self, intact: int) -> tuple[int, int]:
        """(bytes, commits) that lie behind the first `intact` frames and belong to the current run."""
        if self.salt is None:
            return self.size, sum(commit for _, commit in self.frames)
        tail = self.frames[intact:]
        lost = [commit for salt, commit in tail if salt == self.salt]
        size = len(lost) * self.frame_size
        if len(lost) == len(tail):  # no leftovers follow: a piece of a frame at the end is torn too
            size += self.size - _HEADER.size - len(self.frames) * self.frame_size
        return size, sum(lost)


def wal_picture(wal: Path, *, page_size: int) -> WalPicture | None:
    """What lies in the file, or None if there is nothing."""
    frame_size = page_size + _FRAME.size
    try:
        with wal.open("rb") as file:
            head = file.read(_HEADER.size)
            size = wal.stat().st_size
            if size <= _HEADER.size:
                return None
            frames = []
            for offset in range(_HEADER.size, size - frame_size + 1, frame_size):
                file.seek(offset)
                _, commit, *rest = _FRAME.unpack(file.read(_FRAME.size))
                frames.append(((rest[0], rest[1]), commit > 0))
    except FileNotFoundError:
        return None
    return WalPicture(salt=_salt(head), frames=tuple(frames), frame_size=frame_size, size=size)


def _salt(head: bytes) -> tuple[int, int] | None:
    """The salt of an intact header. The checksum is SQLite's own: two running sums over pairs of words."""
    magic, *_, salt_1, salt_2, sum_1, sum_2 = _HEADER.unpack(head)
    if magic not in _MAGIC:
        return None
    words = struct.unpack(_MAGIC[magic], head[:24])
    first = second = 0
    for even, odd in zip(words[::2], words[1::2], strict=True):
        first = (first + even + second) & 0xFFFFFFFF
        second = (second + odd + first) & 0xFFFFFFFF
    return (salt_1, salt_2) if (first, second) == (sum_1, sum_2) else None
