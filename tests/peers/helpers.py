"""What the tests of the peers share."""

import torch


def disturbed(network):
    """The network in eval mode, where every parameter and statistic differs from its initial value."""
    torch.manual_seed(0)
    with torch.no_grad():
        for value in network.state_dict().values():
            if value.is_floating_point():
                value.add_(0.3 * torch.rand_like(value))
    return network.eval()
