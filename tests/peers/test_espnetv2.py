import numpy as np
import pytest
import torch
import torch.nn.functional as F

from peers.espnetv2 import EESP, Down, ESPNetv2, Lateral, Pyramid
from peers.network import exit_costs
from peers.zoo import SEGMENTATION
from tests.peers.helpers import disturbed

PUBLISHED = {0.5: (0.596, 0.145), 1.0: (1.085, 0.308), 1.5: (1.713, 0.517), 2.0: (2.698, 0.845)}
"""Billions of macs: 512x1024 with 20 classes, 360x480 with 11."""


@pytest.mark.parametrize("scale", PUBLISHED)
def test_macs_are_the_published_ones(scale):
    make = SEGMENTATION[f"espnetv2_s{scale:g}"]
    sizes = (20, (512, 1024)), (11, (360, 480))
    macs = [exit_costs(make(num_classes=classes), size)[0].macs for classes, size in sizes]
    assert tuple(round(each / 1e9, 3) for each in macs) == PUBLISHED[scale]


@pytest.mark.parametrize("size", [(64, 96), (37, 51)])
def test_scores_are_as_large_as_the_image(size):
    network = ESPNetv2(0.5, num_classes=5).eval()
    with torch.no_grad():
        assert network(torch.randn(2, 3, *size)).shape == (2, 5, *size)


class Literal:
    """Layers by the names of their weights."""

    def __init__(self, module):
        self.state = module.state_dict()

    def norm(self, x, name):
        names = [f"{name}.{part}" for part in ("running_mean", "running_var", "weight", "bias")]
        return F.batch_norm(x, *(self.state[part] for part in names))

    def cbr(self, x, name, *, groups=1, stride=1, act=True):
        weight = self.state[f"{name}.0.weight"]
        x = self.norm(F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2, groups=groups), f"{name}.1")
        return F.prelu(x, self.state[f"{name}.2.weight"]) if act else x

    def eesp(self, x, name, dilations, stride=1):
        y = self.cbr(x, f"{name}reduce", groups=4)
        found = []
        for k, dilation in enumerate(dilations):
            weight = self.state[f"{name}branches.{k}.weight"]
            found.append(F.conv2d(y, weight, None, stride, dilation, dilation, groups=len(weight)))
        sums = np.cumsum(torch.stack(found).numpy(), 0)  # the least dilated first
        y = self.norm(torch.cat(list(torch.from_numpy(sums)), 1), f"{name}merged.0")
        y = F.prelu(y, self.state[f"{name}merged.1.weight"])
        y = self.cbr(y, f"{name}expand", groups=4, act=False)
        if stride == 2:
            return y
        return F.prelu(y + x if y.shape == x.shape else y, self.state[f"{name}act.weight"])


@pytest.mark.parametrize(("reach", "dilations"), [(13, (1, 2, 3, 4)), (9, (1, 2, 3, 4)), (7, (1, 1, 2, 3))])
@pytest.mark.parametrize("c_in", [16, 8])
def test_a_unit(reach, dilations, c_in):
    unit, x = disturbed(EESP(c_in, 16, reach)), torch.randn(2, c_in, 12, 14)
    with torch.no_grad():
        torch.testing.assert_close(unit(x), Literal(unit).eesp(x, "", dilations), rtol=1e-4, atol=1e-4)


def test_a_map_is_halved_and_sees_the_image():
    down, x, image = disturbed(Down(8, 24, 11, 3)), torch.randn(2, 8, 13, 16), torch.randn(2, 3, 7, 8)
    layers = Literal(down)
    with torch.no_grad():
        parts = [F.avg_pool2d(x, 3, 2, 1), layers.eesp(x, "eesp.", (1, 2, 3, 4), stride=2)]
        seen = layers.cbr(layers.cbr(image, "image.0"), "image.1", act=False)
        wanted = F.prelu(torch.cat(parts, 1) + seen, layers.state["act.weight"])
        torch.testing.assert_close(down(x, image), wanted, rtol=1e-4, atol=1e-4)


def test_a_pyramid_merges_channel_by_channel():
    pyramid, x = disturbed(Pyramid(6, 4, 9)), torch.randn(1, 6, 20, 30)
    layers = Literal(pyramid)
    sizes = [(40, 60), (30, 45), (20, 30), (10, 15), (5, 5)]
    with torch.no_grad():
        y, parts = layers.cbr(x, "project"), []
        for k, size in enumerate(sizes):
            resized = F.adaptive_avg_pool2d(y, size) if k > 2 else F.interpolate(y, size, mode="bilinear")
            part = F.conv2d(resized, layers.state[f"stages.{k}.weight"], padding=1, groups=4)
            parts.append(
                F.interpolate(part, (20, 30), mode="bilinear") if k > 2 else F.adaptive_avg_pool2d(part, (20, 30))
            )
        z = F.prelu(layers.norm(torch.cat(parts, 1), "norm.0"), layers.state["norm.1.weight"])
        order = [
            4 * part + channel for channel in range(4) for part in range(5)
        ]  # the five sizes of a channel together
        wanted = layers.cbr(layers.cbr(z[:, order], "merge", groups=4), "expand")
        torch.testing.assert_close(pyramid(x), wanted, rtol=1e-4, atol=1e-4)


def test_a_level_of_the_encoder_joins_the_decoder():
    lateral, x, coarser = disturbed(Lateral(8, 12)), torch.randn(2, 8, 9, 10), torch.randn(2, 12, 5, 5)
    layers = Literal(lateral)
    with torch.no_grad():
        weight = torch.sigmoid(F.conv2d(F.adaptive_avg_pool2d(x, 1), layers.state["weigh.weight"][..., None, None]))
        y = layers.cbr(x, "expand", groups=4) * weight + F.interpolate(coarser, (9, 10), mode="bilinear")
        wanted = F.prelu(layers.norm(y, "norm.0"), layers.state["norm.1.weight"])
        torch.testing.assert_close(lateral(x, coarser), wanted, rtol=1e-4, atol=1e-4)
