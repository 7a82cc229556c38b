"""Train your own network on your own tables: three branches of a shop predict what a customer will
spend.

python examples/own_model_and_data.py
"""

import numpy as np
from torch import nn

from fedhelix import Federation, FedPer

# One (x, y) pair per client. The branches differ in size and in how their customers behave.
draw = np.random.default_rng(0)
branches = []
for size, habit in ((400, 1.0), (150, 2.0), (60, -1.0)):
    x = draw.normal(size=(size, 5)).astype("float32")
    y = (x[:, :1] + habit * x[:, 1:2] + draw.normal(0, 0.1, (size, 1))).astype("float32")
    branches.append((x, y))


def network() -> nn.Module:
    """Any nn.Module works; methods detect its head and body."""
    return nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1))


fed = Federation(branches, model=network, method=FedPer(), lr=0.05, momentum=0.5, epochs=2)
run = fed.fit(rounds=20)
print(run.metrics.filter(regex="personal_|uplink").tail(1))
print("the personal network of the smallest branch:", run.personal(2))
