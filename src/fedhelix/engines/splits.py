"""The splits of all clients as two arrays, which other processes receive once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from fedhelix.data import Split


class PackedSplits:
    """The splits of all clients in two arrays, of which a client's parts are views."""

    PARTS = ("train", "valid", "test")

    def __init__(self, samples: np.ndarray, ends: np.ndarray):
        self.samples, self.ends = samples, ends

    @classmethod
    def of(cls, splits: Iterable[Split]) -> PackedSplits:
        """The same splits, side by side."""
        parts = [np.asarray(part, np.int64) for split in splits for part in _parts(split)]
        ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
        return cls(np.concatenate(parts), ends)

    def __len__(self) -> int:
        return len(self.ends) // len(self.PARTS)

    def __getitem__(self, client: int) -> Split:
        first = client * len(self.PARTS)
        starts = (self.ends[at - 1] if at else 0 for at in range(first, first + 3))
        return Split(
            *(
                self.samples[start : self.ends[at]]
                for start, at in zip(starts, range(first, first + 3), strict=True)
            )
        )

    def __iter__(self) -> Iterator[Split]:
        return (self[client] for client in range(len(self)))


def _parts(split: Split) -> tuple[np.ndarray, ...]:
    return split.train, split.valid, split.test
