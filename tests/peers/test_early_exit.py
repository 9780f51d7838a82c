import numpy as np
import pytest
import torch
import torch.nn.functional as F

from cnmm.evaluation.classification import Classification
from peers.evaluate import ask, early_exit_rows, exit_rows
from peers.msdnet import MSDNet, MSDNetConfig
from peers.network import ExitCost, exit_costs
from tests.peers.helpers import disturbed

COSTS = [ExitCost(10, 10), ExitCost(25, 20), ExitCost(70, 50)]


def choices(seed, num=200):
    """Answers of three exits: later ones are right more often, and confident ones, too."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (num,), generator=generator)
    found = Classification().choices(4, "accuracy")
    noise = torch.randn(3, num, 4, generator=generator)
    hints = torch.tensor([1.0, 1.5, 3.0])[:, None, None] * F.one_hot(labels, 4)
    found.add(list(noise + hints), labels)
    return found


def test_thresholds_of_held_out_images_on_test_images():
    held_out, test = choices(0), choices(1)
    rows = early_exit_rows(COSTS, held_out, test)
    assert rows[0]["validation"] == {"macs": 10, "quality": pytest.approx(held_out.worth[:, 0].mean())}
    assert rows[-1]["validation"] == {"macs": 80, "quality": pytest.approx(held_out.worth[:, -1].mean())}
    for row in rows:
        for split, these in (("validation", held_out), ("test", test)):
            macs, right = [], []
            for n in range(len(these.worth)):
                exit = next((k for k in (0, 1) if these.confidence[n, k] >= row["confidence"][k]), 2)
                macs.append((10, 30, 80)[exit])
                right.append(these.worth[n, exit])
            assert row[split]["macs"] == pytest.approx(np.mean(macs))
            if split == "test":  # on held-out images, quality is that of thresholds which were found without them
                assert row[split]["quality"] == pytest.approx(np.mean(right))
    spent = [row["validation"]["macs"] for row in rows]
    assert spent == sorted(spent)


def test_all_exits_are_asked():
    network = disturbed(MSDNet(MSDNetConfig(blocks=3, base=1, step=1, width=4, growth=2, head=4), num_classes=4))
    network.train()
    x, labels = torch.randn(30, 3, 16, 16), torch.randint(4, (30,))
    found = ask(network, [(x[:20], labels[:20]), (x[20:], labels[20:])], Classification(), 4)
    assert network.training
    network.eval()
    with torch.no_grad():
        probabilities = torch.stack([scores.softmax(1) for scores in network.exits(x)], 1)
    np.testing.assert_allclose(found.choices.confidence, probabilities.amax(2), rtol=1e-4)
    right = probabilities.argmax(2).eq(labels[:, None]).numpy()
    assert np.array_equal(found.choices.worth, right)
    rows = exit_rows(exit_costs(network, (16, 16)), {"test": found})
    assert [row["test"]["accuracy"] for row in rows] == pytest.approx(right.mean(0))
    assert [row["exit"] for row in rows] == [1, 2, 3]
