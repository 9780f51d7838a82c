import numpy as np
import pytest
import torch
import torch.nn.functional as F

from peers.network import exit_costs, num_params
from peers.plain import Plain
from peers.zoo import PEERS
from tests.peers.helpers import disturbed


@pytest.mark.parametrize(
    ("name", "macs"),
    [
        ("plain_118m", 118_147_360),
        ("plain_33m", 33_066_272),
        ("plain_12m", 12_530_976),
        ("plain_6m", 6_640_224),
        ("plain_3m", 2_835_876),
    ],
)
def test_macs_are_what_the_name_says(name, macs):
    network = PEERS[name](num_classes=10)
    (cost,) = exit_costs(network, (32, 32))
    assert cost.macs == cost.stage == macs
    assert f"{round(macs / 1e6)}m" in (name.removeprefix("plain_"), "13m", "7m")


def test_macs_and_parameters_by_hand():
    """24 -> 64 -> 256 -> 256 channels on maps of 31, 15, 7 and 3 pixels; two convolutions a group."""
    maps = [(31, 3 * 4, 24), (31, 24 * 9, 64), (15, 64 * 9, 64), (15, 64 * 9, 256), (7, 256 * 9, 256)]
    maps += [(7, 256 * 9, 256), (3, 256 * 9, 256), (1, 256, 10)]
    network = Plain((64, 256, 256), num_classes=10)
    assert exit_costs(network, (32, 32))[0].macs == sum(side**2 * c_in * c_out for side, c_in, c_out in maps)
    normalised = 2 * 2 * (64 + 256 + 256)
    assert num_params(network) == sum(c_in * c_out for _, c_in, c_out in maps) + normalised + 24


def test_it_computes_what_it_says():
    """The network, layer by layer with other functions: the weights of a checkpoint mean what these names say."""
    network = disturbed(Plain((8, 12, 16), num_classes=5))
    state, x = network.state_dict(), torch.randn(4, 3, 32, 32)
    y = F.gelu(F.conv2d(x, state["white.weight"], state["white.bias"]))
    for group in range(3):
        for part in "ab":
            y = F.conv2d(y, state[f"groups.{group}.{part}.weight"], padding=1)
            y = F.max_pool2d(y, 2) if part == "a" else y
            names = [f"groups.{group}.n{part}.{name}" for name in ("running_mean", "running_var", "weight", "bias")]
            y = F.gelu(F.batch_norm(y, *(state[name] for name in names)))
    wanted = F.linear(F.max_pool2d(y, 3).flatten(1), state["head.weight"]) / 9 * 3
    with torch.no_grad():
        torch.testing.assert_close(network(x), wanted)


def test_the_first_convolution_whitens_patches():
    torch.manual_seed(0)
    network = Plain((8, 8, 8), num_classes=2)
    images = F.avg_pool2d(torch.randn(50, 3, 20, 20), 3, 1) + torch.randn(50, 3, 1, 1)  # neighbours are alike
    network.start([images[:20], images[20:]])
    with torch.no_grad():
        y = network.white(images)
    rows = y[:, :12].permute(0, 2, 3, 1).reshape(-1, 12).double().numpy()
    np.testing.assert_allclose(rows.T @ rows / len(rows), np.eye(12), atol=0.1)
    torch.testing.assert_close(y[:, 12:], -y[:, :12])
    assert not network.white.weight.requires_grad
