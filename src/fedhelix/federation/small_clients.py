"""Clients that are too small for BatchNorm, with what helps them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from fedhelix.core.errors import UserError
from fedhelix.data import Dataset, Partition, Split
from fedhelix.data.owners import Names
from fedhelix.data.partitions.kinds import Natural
from fedhelix.federation.sampling import Newcomers

FEW = 3  # clients in a sentence


def check_for_batchnorm(
    splits: Sequence[Split],
    names: Names | None,
    partition: Partition,
    data: Dataset,
    settings: Newcomers,
) -> None:
    """Refuse clients with one training sample, of which BatchNorm cannot estimate a variance."""
    small = [client for client, split in enumerate(splits) if len(split.train) == 1]
    if not small:
        return
    listed = [
        f"{client if names is None else repr(names[client])} has {count} for training and "
        f"{len(splits[client].valid)} for validation"
        for client, count in ((client, len(splits[client].train)) for client in small[:FEW])
    ]
    more = ", ..." if len(small) > FEW else ""
    each = "clients have" if len(small) > 1 else "client has"
    raise UserError(
        f"{len(small)} {each} only one training sample, but BatchNorm needs two "
        f"({'; '.join(listed)}{more}); "
        f"{', or '.join(_ways(splits, small, partition, data, settings))}."
    )


def _ways(
    splits: Sequence[Split],
    small: Sequence[int],
    partition: Partition,
    data: Dataset,
    settings: Newcomers,
) -> Iterator[str]:
    """What helps all of these clients."""
    if isinstance(partition, Natural):
        _, owner, _ = partition.kept(data)
        usable = partition.usable(data, data.y)
        sizes = np.bincount(owner[usable][owner[usable] >= 0], minlength=len(splits))
        least = 1 + int(sizes[small].max())  # with the samples that the server keeps
        if (sizes >= least).sum() > settings.newcomers:
            yield (
                f"leave such owners out: min_samples={least} of partition.natural, on the command "
                f"line natural:{least}"
            )
    elif partition.here and not hasattr(partition, "samples"):
        yield "take fewer clients"
    if all(len(splits[client].valid) for client in small) and settings.newcomers_samples is None:
        yield "keep none for validation: valid=0 of the partition, on the command line --valid 0"
    yield "use a network without BatchNorm"
