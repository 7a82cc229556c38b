import pytest
import torch
import torch.nn.functional as F

from fedhelix import load, models
from fedhelix.cpu import applied, compiled
from helpers import small

KERNELS = ["native", "tuned", *(["compiled"] if compiled.available() else [])]


@pytest.mark.parametrize("name", ["digits-cnn", "digits-bn-cnn"])
def test_whole_networks_agree_whatever_the_kernels(name):
    net = models.build(name, (1, 8, 8), 10)
    data = load("digits")
    x, y = data.prepare(data.x[:20]), data.y[:20]
    found = {}
    for kernels in ("onednn", *KERNELS):
        with applied(kernels, net):
            found[kernels] = torch.autograd.grad(F.cross_entropy(net(x), y), list(net.parameters()))
    for kernels in KERNELS:
        for one, other in zip(found[kernels], found["onednn"], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_run_learns_the_same_whatever_the_kernels(kernels):
    runs = [small(model="digits-cnn", kernels=choice).fit(1, quiet=True) for choice in ("onednn", kernels)]
    assert runs[0].records[0]["train_loss"] == pytest.approx(runs[1].records[0]["train_loss"], abs=1e-4)
