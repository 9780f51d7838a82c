"""Training on scenes: views, batches, class weights, and a small training from masks to a frontier."""

import numpy as np
import pytest
import torch

import cnmm
from cnmm.data import open_data
from cnmm.data.scenes import Scene
from cnmm.evaluation.statistics import reestimated
from cnmm.palette import VOID
from cnmm.run_training import train as train_run
from cnmm.training.batches import Images
from cnmm.training.loop import Stopped, train
from cnmm.training.recipes import recipe
from cnmm.training.scene_batches import SceneImages, make_images, training_task
from cnmm.training.views import View, draw_view, show
from tests.helpers import ask, refused
from tests.scenes import scene, write_masks, write_pair
from tests.training.helpers import folder, lines, same, weights

MEAN = np.array([9, 8, 7], np.uint8)
PLAIN = View(size=(48, 64), scale=1.0, place=(0.0, 0.0), mirrored=False, colours=(1.0, 1.0, 1.0))


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    return open_data(f"masks:{write_masks(tmp_path_factory.mktemp('scenes'), num=14, num_test=4)}")


def small_recipe(**options):
    small = {"epochs": 3, "batch_size": 4, "val": 4, "scene_crop": (32, 32), "final_crop": (48, 64), "final_epochs": 1}
    return recipe("street", **{**small, "lr": 0.01, "average": 0.8, "precision": "float32", **options})


def small_model(seed=0):
    torch.manual_seed(seed)
    return cnmm.create_model("cnmm_seg_tiny", num_classes=3, channels=8, blocks=2, scales=2, input_size=(48, 64))


# Views


def test_a_view_of_scale_one_is_a_crop_of_image_and_mask():
    image, mask = scene(1)
    assert all(np.array_equal(*pair) for pair in zip(show(Scene(image, mask), PLAIN, MEAN), (image, mask), strict=True))
    shown = show(Scene(image, mask), PLAIN._replace(size=(20, 30), place=(0.5, 0.999), mirrored=True), MEAN)
    crop = np.s_[14:34, 34:64]  # 29 and 35 places
    assert np.array_equal(shown.image, image[crop][:, ::-1])
    assert np.array_equal(shown.mask, mask[crop][:, ::-1])


def test_where_a_crop_exceeds_the_image_it_is_the_mean_colour_and_void():
    image, mask = scene(2)
    shown = show(Scene(image, mask), PLAIN._replace(size=(60, 70), place=(0.5, 0.0)), MEAN)
    assert np.array_equal(shown.image[6:54, :64], image)
    assert np.array_equal(shown.mask[6:54, :64], mask)
    outside = np.ones((60, 70), bool)
    outside[6:54, :64] = False
    assert (shown.mask[outside] == VOID).all()
    assert (shown.image[outside] == MEAN).all()
    dark = show(Scene(image, mask), PLAIN._replace(size=(60, 70), colours=(0.5, 1.0, 1.0)), MEAN)
    assert (dark.image[-1, -1] == MEAN).all()  # the mean colour stays what it is


def test_masks_are_picked_and_images_interpolated():
    image, mask = scene(3, void=False)
    doubled = show(Scene(image, mask), PLAIN._replace(size=(96, 128), scale=2.0), MEAN)
    assert np.array_equal(doubled.mask, mask.repeat(2, 0).repeat(2, 1))
    assert set(np.unique(show(Scene(image, mask * 100), PLAIN._replace(scale=0.71), MEAN).mask)) <= {0, 100, 200, VOID}
    fine = np.kron(mask, np.ones((3, 3), np.uint8))  # labels of three times the resolution
    assert np.array_equal(show(Scene(image, fine), PLAIN, MEAN).mask, mask)


def test_image_and_mask_stay_together():
    """Of a scene whose image is its mask, any view shows the mask, but where it is blurred at borders."""
    _, mask = scene(4, (90, 120), void=False)
    image = np.repeat(mask[..., None] * 100, 3, 2)
    for k in range(20):
        view = draw_view((0, k), (60, 70), zoom=(0.75, 2.0), flip=True)
        shown = show(Scene(image, mask), view, MEAN)
        known = shown.mask != VOID
        agree = np.abs(shown.image[..., 0].astype(int) - shown.mask.astype(int) * 100) < 50
        assert agree[known].mean() > 0.95


def test_colours_change_by_brightness_contrast_and_saturation():
    image, mask = scene(5)
    dark = show(Scene(image, mask), PLAIN._replace(colours=(0.5, 1.0, 1.0)), MEAN).image
    assert np.abs(dark.astype(int) - image.astype(int) / 2).max() <= 1
    flat = show(Scene(image, mask), PLAIN._replace(colours=(1.0, 0.0, 1.0)), MEAN).image
    grey = image.astype(float) @ [0.299, 0.587, 0.114]
    assert np.abs(flat - grey.mean()).max() <= 1
    pale = show(Scene(image, mask), PLAIN._replace(colours=(1.0, 1.0, 0.0)), MEAN).image
    assert np.abs(pale - grey[..., None]).max() <= 1


def test_a_view_depends_on_its_key_alone():
    options = {"zoom": (0.5, 2.0), "colour": 0.3, "flip": True}
    views = [draw_view((0, epoch, image), (9, 9), **options) for epoch in range(40) for image in range(40)]
    assert views[45] == draw_view((0, 1, 5), (9, 9), **options)
    assert len(set(views)) == 1600
    scales = np.log2([view.scale for view in views])
    assert (np.abs(scales) <= 1).all()
    assert abs(scales.mean()) < 0.05
    assert 0.45 < np.mean([view.mirrored for view in views]) < 0.55
    assert all(0.7 <= factor <= 1.3 for view in views for factor in view.colours)


# Batches


def test_training_batches_are_crops_of_their_epochs_size(scenes):
    config = small_recipe()
    images = make_images(scenes, config)
    assert isinstance(images, SceneImages)
    kept = np.arange(10)
    for epoch, size in ((0, (32, 32)), (2, (48, 64))):
        batches = list(images.training_batches(scenes.train, kept, epoch))
        assert [batch.step for batch in batches] == [0, 1]
        for batch in batches:
            assert batch.images.shape == (4, 3, *size)
            assert (batch.labels.shape, batch.labels.dtype) == ((4, *size), torch.uint8)
        (again,) = images.training_batches(scenes.train, kept, epoch, first=1)
        assert torch.equal(again.images, batches[1].images)
        assert torch.equal(again.labels, batches[1].labels)


def test_whole_images_are_as_they_are_whatever_their_sizes(tmp_path):
    for k, size in enumerate([(48, 64), (64, 48), (48, 64), (49, 64)]):
        write_pair(tmp_path / "images", tmp_path / "masks", f"{k}", k, size=size)
    (tmp_path / "classes.txt").write_text("a\nb\nc")
    data = open_data(f"masks:{tmp_path}")
    images = make_images(data, small_recipe())
    batches = list(images.batches(data.train, np.arange(4)))
    assert [tuple(masks.shape) for _, masks in batches] == [(2, 48, 64), (1, 64, 48), (1, 49, 64)]
    assert images.num_batches(data.train, np.arange(4)) == 3
    image, mask = scene(2)
    pixels = batches[0][0][1].permute(1, 2, 0) * torch.tensor(data.std) * 255 + torch.tensor(data.mean) * 255
    assert np.abs(pixels.numpy() - image).max() < 1e-3
    assert np.array_equal(batches[0][1][1].numpy(), mask)
    statistics = list(images.statistics_batches(data.train, np.arange(4)))
    assert len(statistics) == images.num_statistics(data.train, np.arange(4)) == 3
    assert torch.equal(statistics[0], batches[0][0])
    assert images.damage_batch(data.train, np.arange(4)).shape == (4, 3, 48, 64)


def test_rare_classes_count_more(scenes):
    model, kept = small_model(), np.arange(10)
    task = training_task(model, scenes, kept, small_recipe())
    labels = np.concatenate([scene(k)[1].ravel() for k in range(10)])
    shares = np.bincount(labels[labels != VOID], minlength=3) / (labels != VOID).sum()
    assert task.class_weights.tolist() == pytest.approx((1 / np.log(1.10 + shares)).tolist(), rel=1e-6)
    assert training_task(model, scenes, kept, small_recipe(class_weights="equal")).class_weights is None


def test_images_with_labels_are_prepared_as_before(fashion_folder):
    data = open_data(f"fashion:{fashion_folder}")
    assert type(make_images(data, recipe("quick"))) is Images


# Trainings


@pytest.mark.parametrize("after", [1, 4])
def test_a_stopped_training_goes_on_to_the_same_weights(scenes, tmp_path, after):
    """Bit by bit: in an epoch of crops, and in the last epoch with whole images and ladder tuning."""
    config = small_recipe(ladder_start=0.5)
    whole = train(small_model(), scenes, config, folder(tmp_path / "whole"))
    count = []
    with pytest.raises(Stopped, match="stopped after epoch"):
        train(
            small_model(),
            scenes,
            config,
            folder(tmp_path / "parts"),
            on_step=count.append,
            should_stop=lambda: len(count) == after,
        )
    resumed = train(small_model(seed=9), scenes, config, tmp_path / "parts", resume=True)
    assert same(weights(whole), weights(resumed))
    assert [line["epoch"] for line in lines(tmp_path / "parts")] == [1, 2, 3]


@pytest.fixture(scope="module")
def seg_run(scenes, tmp_path_factory):
    """A small mixture trained on the scenes, and measured."""
    options = {"epochs": 20, "batch_size": 5, "val": 4, "average": 0.9, "lr": 0.01, "matrix_lr": 0.05}
    crops = {"scene_crop": (32, 48), "final_crop": (48, 64), "final_epochs": 6, "precision": "float32"}
    place = tmp_path_factory.mktemp("trained") / "run"
    run = train_run(scenes.spec, place, model="cnmm_seg_tiny", channels=8, recipe="street", **options, **crops)
    run.measure(test=True, points=8)
    return run


def test_a_training_learns_to_label_pixels(seg_run):
    quality = seg_run.evaluation.quality
    assert (quality.metric, quality.n, len(quality.per_class)) == ("miou", 4, 3)
    assert quality.value > 0.5
    assert seg_run.preprocessing.classes == ("ground", "box", "disc")
    assert len(seg_run.preprocessing.palette) == 3
    assert "mIoU (%) on 4 test images" in (seg_run.folder / "README.md").read_text()


def test_its_frontier_serves_budgets(seg_run):
    frontier = seg_run.frontier
    assert frontier.metric == "miou"
    assert all(len(point.per_class) == 3 for point in frontier.points)
    best = frontier.envelope()[-1]
    assert seg_run.choose(f"miou:{best.quality - 1e-6}").quality >= best.quality - 1e-6
    assert "these points were measured by miou; try miou:0.5" in refused(seg_run.choose, "acc:0.5")
    again = cnmm.Run(seg_run.folder).evaluate(point=best.name)
    assert again.quality.value == pytest.approx(best.test_quality)
    cascade = frontier.cascade
    assert cascade.metric == "miou"
    assert cascade.n == 4
    assert cascade.thresholds[0].average_macs == cascade.macs[0] <= cascade.thresholds[-1].average_macs


def test_statistics_of_points_are_those_of_whole_images(seg_run):
    """Any point's stored statistics are the average over batches of whole training images in expectation mode."""

    best = seg_run.frontier.envelope()[-1]
    point = cnmm.named_point(seg_run.model, best.name)
    images = make_images(seg_run.images.data, seg_run.config)
    kept = np.setdiff1d(np.arange(14), seg_run.images.split("validation")[1])
    batches = [x for x, _ in images.batches(seg_run.images.data.train, kept)]
    expected = dict(reestimated(seg_run.model, batches, point).named_buffers())
    stored = seg_run.frontier.buffers[best.name]
    for name, tensor in stored.items():
        assert torch.allclose(tensor, expected[name], atol=1e-5), name


def test_the_command_line_evaluates_pixels(seg_run, capsys):
    answer = ask(capsys, "evaluate", seg_run.folder)
    assert (answer["metric"], answer["n"]) == ("miou", 4)
    assert answer["miou"] == answer["quality"] == seg_run.evaluation.quality.value
    assert len(answer["exits"][-1]["per_class"]) == 3
    assert ask(capsys, "choose", seg_run.folder, "--budget", "miou:0.2")["metric"] == "miou"


def test_models_and_data_must_label_the_same(scenes, fashion_folder, tmp_path):
    words = refused(train_run, scenes.spec, tmp_path / "a", model="cnmm_tiny", recipe="street")
    assert "cnmm_tiny labels images" in words
    words = refused(train_run, f"fashion:{fashion_folder}", tmp_path / "b", model="cnmm_seg_tiny")
    assert "cnmm_seg_tiny labels pixels" in words
    words = refused(train_run, scenes.spec, tmp_path / "c", model="cnmm_seg_tiny", recipe="street", teacher="x.onnx")
    assert "labels pixels; remove --teacher" in words
    assert not any(tmp_path.iterdir())
