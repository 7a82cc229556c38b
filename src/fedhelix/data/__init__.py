"""Data: loading, your own arrays, partitions over clients, augmentation."""

from fedhelix.data import partitions
from fedhelix.data.arrays import from_arrays, from_clients, from_npz
from fedhelix.data.augment import Augmentation, CropAndFlip, crop_and_flip, draw_crops
from fedhelix.data.columns import is_table
from fedhelix.data.datasets import Dataset, rows_of
from fedhelix.data.federated import from_ag_news, from_har, from_hub, from_leaf
from fedhelix.data.loading import Availability, available, load
from fedhelix.data.partitions import Partition, Split, class_split
from fedhelix.data.scaling import Scaling, scaled
from fedhelix.data.server_data import Reserve, ServerData, even_sample
from fedhelix.data.shifts import UNSHIFTED, Shift, ShiftedData, shifted
from fedhelix.data.tables import from_table

__all__ = [
    "UNSHIFTED",
    "Augmentation",
    "Availability",
    "CropAndFlip",
    "Dataset",
    "Partition",
    "Reserve",
    "Scaling",
    "ServerData",
    "Shift",
    "ShiftedData",
    "Split",
    "available",
    "class_split",
    "crop_and_flip",
    "draw_crops",
    "even_sample",
    "from_ag_news",
    "from_arrays",
    "from_clients",
    "from_har",
    "from_hub",
    "from_leaf",
    "from_npz",
    "from_table",
    "is_table",
    "load",
    "partitions",
    "rows_of",
    "scaled",
    "shifted",
]
