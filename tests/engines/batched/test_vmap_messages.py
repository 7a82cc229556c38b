"""What PyTorch says about `vmap` is translated, or left out where nobody can change it."""

import warnings

import pytest
import torch
from torch import nn

from fedhelix import FedAvg, UserError, from_arrays
from fedhelix.core.seeds import draw
from helpers import small

X = torch.randn(40, 4, generator=draw(0, "vmap"))
DATA = from_arrays(X, (X[:, 0] > 0).long())


class Careful(FedAvg):
    """Its loss looks at values."""

    name = "careful"

    def loss(self, params, batch, local):
        value = local.base_loss(params, batch)
        return value if value.item() > 0 else 2 * value


class Attention(nn.Module):
    """One layer of a transformer, whose values are tokens."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 1, 8, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.layer(x[:, None])[:, 0])


def test_a_loss_that_looks_at_values_is_named():
    fed = small(Careful(), data=DATA, engine="batched", clients=3)
    with pytest.raises(UserError, match=r"^careful\.loss looks at values .*or engine = serial"):
        fed.fit(1, quiet=True)


def test_a_transformer_brings_no_advice_for_pytorchs_developers():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        small(data=DATA, model=Attention, engine="batched", clients=3).fit(1, quiet=True)
    assert not [one for one in caught if "performance drop" in str(one.message)]
