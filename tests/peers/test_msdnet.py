import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from peers.msdnet import MSDNet, MSDNetConfig
from peers.network import exit_costs, num_params
from peers.zoo import PEERS
from tests.peers.helpers import disturbed

PUBLISHED = {
    "msdnet_even10": [15.0, 25.2, 37.4, 51.6, 61.7, 73.5, 87.1, 99.4, 109.4, 121.0],
    "msdnet_lin5": [6.8, 14.2, 27.2, 41.3, 58.0],
}
"""Millions of macs of an image that passes all classifiers before an exit, as MSDNet's authors count."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_macs_are_the_published_ones(name):
    costs = exit_costs(PEERS[name](num_classes=10), (32, 32))
    passed = itertools.accumulate(cost.stage for cost in costs)
    assert [round(macs / 1e6, 1) for macs in passed] == PUBLISHED[name]


def test_parameters_are_the_published_ones():
    assert round(num_params(PEERS["msdnet_even10"](num_classes=10)) / 1e6, 2) == 4.84


@pytest.mark.parametrize("name", ["msdnet_lin5_s2", "msdnet_lin5_narrow"])
def test_the_small_ones_cover_3_to_13_million(name):
    macs = [cost.macs / 1e6 for cost in exit_costs(PEERS[name](num_classes=10), (32, 32))]
    assert macs[0] < 3 < macs[1]
    assert 12.1 < macs[-1] < 13  # no less than cnmm_b4s3


def test_an_exit_pays_for_its_own_classifier_only():
    network = PEERS["msdnet_lin5"](num_classes=10)
    costs = exit_costs(network, (32, 32))
    heads = []
    for classifier in network.classifiers:
        c_in = classifier.convolutions[0][0].in_channels
        heads.append(9 * c_in * 128 * 16 + 9 * 128 * 128 * 4 + 128 * 10)
    for number, cost in enumerate(costs):
        assert cost.macs == sum(each.stage for each in costs[: number + 1]) - sum(heads[:number])


def literal(network, config, x):
    """The architecture in numbered steps, from the names of the weights: all exits' scores."""
    state, scales = network.state_dict(), config.scales

    def conv_bn_relu(x, name, stride=1):
        weight = state[f"{name}.0.weight"]
        x = F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2)
        names = [f"{name}.1.{part}" for part in ("running_mean", "running_var", "weight", "bias")]
        return F.relu(F.batch_norm(x, *(state[part] for part in names)))

    def bottleneck(x, name, stride=1):
        inner, outer = (state[f"{name}.{part}.0.weight"] for part in "01")
        times = int(2 ** (math.log2(x.shape[1] / finest)))  # the factor of the scale that x is of
        assert inner.shape[:2] == (min(x.shape[1], times * outer.shape[0]), x.shape[1])
        return conv_bn_relu(conv_bn_relu(x, f"{name}.0"), f"{name}.1", stride)

    maps, finest = {}, config.width
    for scale in range(scales):
        x = conv_bn_relu(x, f"first.scales.{scale}", 2 if scale else config.stride)
        maps[scale] = x
        assert x.shape[1] == config.width * 2**scale
    sizes = {"even": lambda k: config.step, "lin_grow": lambda k: config.step * k + 1}[config.growth_mode]
    blocks = [config.base if k == 0 else sizes(k) for k in range(config.blocks)]
    interval, number = math.ceil(sum(blocks) / scales), 0
    for block, layers in enumerate(blocks):
        place = 0
        for _ in range(layers):
            number += 1
            before = scales - max(0, number - 2) // interval  # scales that come in, and that are left
            after = scales - (number - 1) // interval
            left, new = range(scales - after, scales), {}
            ends = before > after
            for k, scale in enumerate(left):
                own = bottleneck(maps[scale], f"blocks.{block}.{place}.same.{k}")
                parts = [maps[scale], own]
                if k or ends:
                    down = f"blocks.{block}.{place}.down.{k if ends else k - 1}"
                    parts.insert(1, bottleneck(maps[scale - 1], down, 2))
                assert sum(part.shape[1] for part in parts[1:]) == config.growth * 2**scale
                new[scale] = torch.cat(parts, 1)
            maps, finest, place = new, finest + config.growth, place + 1
            if ends:
                for k, scale in enumerate(left):
                    maps[scale] = conv_bn_relu(maps[scale], f"blocks.{block}.{place}.scales.{k}")
                    assert maps[scale].shape[1] == finest // 2 * 2**scale
                finest, place = finest // 2, place + 1
        y = maps[scales - 1]
        for part in "01":
            y = conv_bn_relu(y, f"classifiers.{block}.convolutions.{part}", 2)
        y = F.avg_pool2d(y, y.shape[-1]).flatten(1)
        yield F.linear(y, *(state[f"classifiers.{block}.linear.{part}"] for part in ("weight", "bias")))


@pytest.mark.parametrize(
    "config",
    [
        MSDNetConfig(blocks=4, base=3, step=2, width=8, growth=4, head=8),
        MSDNetConfig(blocks=4, base=1, step=1, growth_mode="lin_grow", width=6, growth=2, head=6, stride=2),
        MSDNetConfig(blocks=3, base=2, step=1, scales=2, width=5, growth=3, head=4),
        MSDNetConfig(blocks=1, base=1, step=1, scales=3, width=4, growth=2, head=4),
    ],
)
def test_it_is_the_architecture_step_by_step(config):
    network = disturbed(MSDNet(config, num_classes=3))
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        for found, wanted in zip(network.exits(x), literal(network, config, x), strict=True):
            torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(network(x), found)
