import pytest
import torch

from peers.network import exit_costs
from peers.plain import Plain
from peers.slimmable import SHARES, Slimmable
from tests.peers.helpers import disturbed

WIDTHS = (8, 12, 16)


def cut_out(network, number):
    """A width as a plain network of its own, with the first channels of every weight."""
    widths = tuple(int(SHARES[number] * width) for width in WIDTHS)
    plain, state = Plain(widths, num_classes=5), network.state_dict()
    own = {}
    for name, value in plain.state_dict().items():
        parts = name.split(".")
        if parts[-2] in ("na", "nb"):
            name = ".".join([*parts[:-1], str(number), parts[-1]])
        own[".".join(parts)] = state[name][tuple(slice(size) for size in value.shape)]
    plain.load_state_dict(own)
    return plain.eval()


@pytest.mark.parametrize("number", range(4))
def test_a_width_is_a_plain_network_of_the_first_channels(number):
    network = disturbed(Slimmable(WIDTHS, num_classes=5))
    plain, x = cut_out(network, number), torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        scores = list(network.exits(x))
        torch.testing.assert_close(scores[number], plain(x))
        torch.testing.assert_close(network(x), scores[-1])
    assert exit_costs(network, (32, 32))[number] == exit_costs(plain, (32, 32))[0]


def test_statistics_belong_to_a_width_and_weights_to_all():
    network = Slimmable(WIDTHS, num_classes=5).train()
    network.narrow(torch.randn(4, 3, 32, 32), 1).sum().backward()
    group = network.groups[1]
    moved = [bool(norm.running_mean.any()) for norm in group.na]
    assert moved == [False, True, False, False]
    gradient = group.b.weight.grad
    assert gradient[:6, :6].any()
    assert not gradient[6:].any()
    assert not gradient[:, 6:].any()
