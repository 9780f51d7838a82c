import json
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torchmetrics.classification import MulticlassJaccardIndex

from cnmm.data import hold_out, open_data
from cnmm.palette import VOID
from cnmm.training import checkpoint
from cnmm.training.teacher import open_teacher
from peers import train as finishing
from peers import training
from peers.msdnet import MSDNet, MSDNetConfig
from peers.network import exit_costs, onnx_bytes
from peers.plain import Plain
from peers.recipes import peer_recipe
from peers.slimmable import Slimmable
from peers.train import main, train_peer
from peers.training import Training
from peers.zoo import PEERS, create_peer
from tests.helpers import refused
from tests.peers.helpers import disturbed
from tests.scenes import scene, write_masks

TINY_MSDNET = MSDNetConfig(blocks=2, base=1, step=1, scales=2, width=4, growth=2, stride=2, head=4)


@pytest.fixture(scope="module", autouse=True)
def small_peers():
    """A few kilobytes of each kind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PEERS, "plain_tiny", partial(Plain, (4, 8, 8)))
        patch.setitem(PEERS, "msdnet_tiny", partial(MSDNet, TINY_MSDNET))
        patch.setitem(PEERS, "slimmable_tiny", partial(Slimmable, (4, 8, 8)))
        yield


@pytest.fixture(scope="module")
def spec(fashion_folder):
    return f"fashion:{fashion_folder}"


SHORT = {"epochs": 2, "batch_size": 50, "val": 100}
KINDS = [("plain_tiny", "own"), ("plain_tiny", "ours"), ("msdnet_tiny", "own"), ("msdnet_tiny", "ours")]
KINDS += [("slimmable_tiny", "ours"), ("espnetv2_s0.5", "own"), ("espnetv2_s0.5", "ours")]
SCENES = {"epochs": 4, "batch_size": 4, "val": 4, "scene_crop": (32, 32), "final_crop": (48, 64)}


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    return f"masks:{write_masks(tmp_path_factory.mktemp('scenes'), num=12, num_test=3)}"


@pytest.fixture(scope="module")
def folder(spec, tmp_path_factory):
    """One peer, trained for two short epochs."""
    path = tmp_path_factory.mktemp("peers") / "plain"
    train_peer("plain_tiny", spec, path, command="the command", **SHORT)
    return path


@pytest.fixture
def no_onnx(monkeypatch):
    """Torch's exporter takes seconds; the fixture above has run it."""
    monkeypatch.setattr(finishing, "onnx_bytes", lambda *arguments: b"")


def weights(path):
    return load_file(path / "model.safetensors")


@pytest.mark.parametrize(("name", "recipe"), KINDS)
def test_a_training_goes_on_bit_by_bit(name, recipe, spec, scenes, tmp_path, no_onnx):
    data, short = (scenes, SCENES | {"epochs": 2}) if name.startswith("espnet") else (spec, SHORT)
    whole = train_peer(name, data, tmp_path / "whole", recipe=recipe, **short)
    save = checkpoint.save_state

    def stop(*arguments):
        save(*arguments)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "save_state", stop)
        with pytest.raises(KeyboardInterrupt):
            train_peer(name, data, tmp_path / "parts", recipe=recipe, **short)
    resumed = train_peer(name, data, tmp_path / "parts", recipe=recipe, resume=True, **short)
    one, other = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert resumed["exits"] == whole["exits"]
    first, second = ((tmp_path / part / "log.jsonl").read_text().splitlines() for part in ("whole", "parts"))
    assert [json.loads(line)["loss"] for line in first] == [json.loads(line)["loss"] for line in second]


def test_scenes_are_measured_by_their_own_metric(scenes, tmp_path):
    results = train_peer("espnetv2_s0.5", scenes, tmp_path / "a", recipe="ours", **SCENES | {"epochs": 1})
    assert results["metric"] == "miou"
    (row,) = results["exits"]
    data = open_data(scenes)
    network = create_peer("espnetv2_s0.5", data).eval()
    network.load_state_dict(weights(tmp_path / "a"))
    assert row["macs"] == exit_costs(network, (48, 64))[0].macs
    oracle = MulticlassJaccardIndex(3, average="macro", ignore_index=VOID)
    for n in range(3):
        image, mask = scene(100 + n)
        x = (torch.from_numpy(image).permute(2, 0, 1)[None].float() / 255).sub(torch.tensor(data.mean)[:, None, None])
        with torch.no_grad():
            oracle.update(network(x / torch.tensor(data.std)[:, None, None]), torch.from_numpy(mask)[None].long())
    assert row["test"]["n"] == 3
    assert row["test"]["miou"] == pytest.approx(oracle.compute().item(), abs=1e-4)
    assert not (tmp_path / "a" / "model.onnx").exists()  # pixels teach nobody


def test_the_result_is_averaged_and_its_statistics_are_those_of_the_average(spec, tmp_path, no_onnx):
    data = open_data(spec)
    peer = Training("plain_tiny", data, peer_recipe("plain_tiny", **SHORT, average=0.5, precision="float32"), tmp_path)
    peer.start()
    wanted = {name: value.detach().clone() for name, value in peer.network.named_parameters()}
    for batch in peer.images.training_batches(data.train, peer.kept, 0):
        peer.step(batch, 0)
        peer.average.update(peer.network, 100 + batch.step)  # past the first steps, which count for more
        wanted = {name: 0.5 * wanted[name] + 0.5 * value.detach() for name, value in peer.network.named_parameters()}
    network = peer.finish()
    for name, value in network.named_parameters():
        torch.testing.assert_close(value.detach(), wanted[name])
    maps = []
    network.groups[0].a.register_forward_hook(lambda module, inputs, out: maps.append(F.max_pool2d(out, 2)))
    with torch.no_grad():
        for images in peer.images.statistics_batches(data.train, peer.kept):
            network(images)
    means = torch.stack([each.mean((0, 2, 3)) for each in maps]).mean(0)
    torch.testing.assert_close(network.groups[0].na.running_mean, means, rtol=1e-4, atol=1e-5)


def test_it_learns_from_what_a_mixture_learns_from(spec, tmp_path):
    """The images that are held out, and the views of the others, are those of the mixtures' own loop."""
    peer = Training("plain_tiny", open_data(spec), peer_recipe("plain_tiny", "ours", **SHORT), tmp_path)
    kept, held_out = hold_out(peer.data.train.labels, 100, peer.config.seed)
    assert np.array_equal(peer.kept, kept)
    assert np.array_equal(peer.held_out, held_out)
    assert (peer.config.padding, peer.config.flips, peer.config.label_smoothing) == ("reflect", "alternating", 0.1)


def test_results_say_what_was_done_and_found(folder, spec):
    results = json.loads((folder / "results.json").read_text())
    assert results["peer"] == "plain_tiny"
    assert results["command"] == "the command"
    assert results["train"]["seed"] == 0
    assert results["train"]["epochs"] == 2
    assert results["threads"] == torch.get_num_threads()
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert results["minutes"] == pytest.approx(sum(line["seconds"] for line in lines) / 60)
    data, (row,) = open_data(spec), results["exits"]
    ask = open_teacher(str(folder / "model.onnx"), data)
    _, held_out = hold_out(data.train.labels, 100, 0)
    for split, images, chosen in (("validation", data.train, held_out), ("test", data.test, np.arange(100))):
        right = ask(images.read(chosen)).argmax(1).numpy() == images.labels[chosen]
        assert row[split]["n"] == 100
        assert row[split]["accuracy"] == pytest.approx(right.mean())
        assert row[split]["low"] < row[split]["accuracy"] < row[split]["high"]


@pytest.mark.parametrize("name", ["msdnet_tiny", "slimmable_tiny"])
def test_onnx_says_what_torch_says(name, tmp_path):
    network = disturbed(PEERS[name](num_classes=7, in_chans=3)).train()
    session = onnxruntime.InferenceSession(onnx_bytes(network, (32, 32)))
    assert network.training
    network.eval()
    for num in (1, 5):
        x = torch.randn(num, 3, 32, 32)
        with torch.no_grad():
            wanted = network(x).numpy()
        np.testing.assert_allclose(session.run(None, {"image": x.numpy()})[0], wanted, rtol=1e-3, atol=1e-4)


def test_a_peer_teaches_a_peer(folder, spec, tmp_path, no_onnx):
    train_peer("plain_tiny", spec, tmp_path / "a", teacher=str(folder / "model.onnx"), **SHORT | {"epochs": 1})
    assert (tmp_path / "a" / "teacher.safetensors").is_file()


def test_losses_of_all_exits_are_summed_and_the_last_exit_teaches_the_others(spec, tmp_path):
    config = peer_recipe("msdnet_tiny", "ours", precision="float32", **SHORT)
    peer = Training("msdnet_tiny", open_data(spec), config, tmp_path)
    batch = next(peer.images.training_batches(peer.data.train, peer.kept, 0))
    peer.network.train()
    scores = [each.detach() for each in peer.network.exits(batch.images)]
    hard = [F.cross_entropy(score, batch.labels, label_smoothing=0.1) for score in scores]
    torch.testing.assert_close(peer.loss(batch, distilled=False), sum(hard))
    best = scores[-1].softmax(1)
    soft = [F.kl_div(score.log_softmax(1), best, reduction="batchmean") for score in scores[:-1]]
    wanted = hard[-1] + sum(0.5 * a + 0.5 * b for a, b in zip(hard, soft, strict=False))
    torch.testing.assert_close(peer.loss(batch, distilled=True).detach(), wanted)


def test_minutes_tell_the_epochs_and_are_kept(spec, tmp_path, monkeypatch, no_onnx):
    monkeypatch.setattr(Training, "epoch_s", lambda self: 6)
    short = {**SHORT, "epochs": 1}
    train_peer("plain_tiny", spec, tmp_path / "a", minutes=0.25, **short)
    assert len((tmp_path / "a" / "log.jsonl").read_text().splitlines()) == 2
    monkeypatch.setattr(Training, "epoch_s", lambda self: 1e9)
    assert train_peer("plain_tiny", spec, tmp_path / "a", minutes=0.25, resume=True, **short)["train"]["epochs"] == 2


def test_the_time_of_a_step_is_measured_on_a_copy(spec, tmp_path):
    peer = Training("plain_tiny", open_data(spec), peer_recipe("plain_tiny", **SHORT), tmp_path)
    before = {name: value.clone() for name, value in peer.network.state_dict().items()}
    assert 0 < peer.epoch_s() < 100
    assert all(torch.equal(before[name], value) for name, value in peer.network.state_dict().items())


def test_where_crops_grow_both_kinds_of_epochs_are_timed(scenes, tmp_path, monkeypatch):
    peer = Training("espnetv2_s0.5", open_data(scenes), peer_recipe("espnetv2_s0.5", "ours", **SCENES), tmp_path)
    assert (peer.config.epochs, peer.config.final_epochs) == (4, 1)
    monkeypatch.setattr(peer, "step_s", lambda epoch: {0: 2.0, 3: 6.0}[epoch])
    assert peer.epoch_s() == peer.steps * 3.0


def test_words_for_what_does_not_fit(folder, spec, tmp_path, capsys):
    assert "espnetv2_s1 labels pixels" in refused(train_peer, "espnetv2_s1", spec, tmp_path / "b", **SHORT)
    assert "a training is there; use --resume" in refused(train_peer, "plain_tiny", spec, folder)
    assert "nothing is there; remove --resume" in refused(train_peer, "plain_tiny", spec, tmp_path / "b", resume=True)
    other = refused(train_peer, "plain_tiny", spec, folder, resume=True, seed=3, **SHORT)
    assert "holds another training; use the same options" in other
    assert "unknown peer 'vgg': must be one of plain_118m" in refused(train_peer, "vgg", spec, tmp_path / "b")
    assert main(["plain_3m", "--data", "nothing", "--out", str(tmp_path / "b")]) == 2
    assert capsys.readouterr().err.startswith("peers: unknown data 'nothing'")
    assert not Path(tmp_path / "b").exists()
