"""`ImageData`: splits, storage, augmentation by step, and streaming that can be repeated."""

import importlib.util
import random
import sys
from dataclasses import replace
from itertools import islice
from types import ModuleType

import numpy as np
import pytest
import torch
from rich.console import Console

from fst.data import DataError, ImageBatch, ImageData, ResidentImages, StreamedImages
from fst.data.image_data import stratified
from fst.data.image_decoding import View
from fst.data.image_samples import seeded
from fst.data.images import find_split
from image_examples import (
    CLASSES,
    bad_members,
    encoded,
    members,
    picture,
    write_data_set,
    write_folder,
    write_tar,
)

SMALL = ImageData(image_size=(24, 24), resize=28, stored_size=32, workers=2)


def rows(samples) -> torch.Tensor:
    return torch.arange(len(samples))


@pytest.fixture
def folder(tmp_path):
    return write_data_set(tmp_path / "data")


def test_load_gives_training_and_validation_images(folder):
    SMALL.prepare(folder)
    assert SMALL.describe(folder) == CLASSES
    training, validation = (split.samples for split in SMALL.load(folder, augment=True))
    assert isinstance(training, ResidentImages)
    assert training.pixels.shape == (12, 3, 32, 32)
    assert training.pixels.dtype == torch.uint8
    assert training.labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert training.names[5] == "pear/1.png"
    assert validation.pixels.shape == (6, 3, 24, 24)
    generator = torch.Generator().manual_seed(3)
    numbers = training.augmentations(12, generator)
    batch = training.batch(rows(training), None, numbers)
    assert isinstance(batch, ImageBatch)
    assert batch.images.shape == (12, 3, 24, 24)
    again = training.batch(rows(training)[4:7], None, numbers[4:7])
    torch.testing.assert_close(again.images, batch.images[4:7], atol=1e-5, rtol=0)
    assert again.labels.tolist() == [1, 1, 1]
    test = SMALL.load_test(folder).samples
    assert torch.equal(test.pixels, validation.pixels)
    assert validation.augmentations(2, generator) is None


def test_validation_is_the_evaluation_view_of_the_file(folder):
    validation = SMALL.load(folder)[1].samples
    batch = validation.batch(torch.tensor([3]))
    expected = View.evaluation((24, 24), 28)(picture("pear", 1))
    assert torch.equal(batch.images[0], torch.from_numpy(expected) / 255)
    assert batch.labels.tolist() == [1]


def test_without_augmentation_training_images_are_seen_as_in_validation(tmp_path):
    write_folder(tmp_path / "train", members(size=(40, 40)))
    write_folder(tmp_path / "val", members(1))
    training = SMALL.load(tmp_path)[0].samples
    assert training.augmentations(3, torch.Generator()) is None
    images = training.batch(torch.tensor([5])).images
    expected = torch.from_numpy(SMALL.evaluation_view(picture("pear", 1, (40, 40)))) / 255
    assert images.shape == (1, 3, 24, 24)
    # Scaled twice instead of once.
    assert (images[0] - expected).abs().mean() < 0.01


def test_bad_files_are_skipped_and_reported(tmp_path):
    write_folder(tmp_path / "train", members() | bad_members())
    mixed = sorted(members(4).items(), key=lambda item: item[0].split("/")[1])
    path = write_tar(tmp_path / "val.tar", mixed)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    console = Console(record=True, width=500)
    training, validation = (split.samples for split in SMALL.load(tmp_path, console=console))
    assert len(training) == 12
    assert {item.name for item in training.skipped} == {f"train/{name}" for name in bad_members()}
    assert training.labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    text = console.export_text()
    assert "12 images of 3 classes for training; 3 skipped: train/apple/cut.jpg (" in text
    assert "train/pear/empty.png (is empty)" in text
    assert any("ends too early" in item.reason for item in validation.skipped)
    assert 3 <= len(validation) < 9


def test_nothing_left_is_an_error_that_says_why(tmp_path):
    write_folder(tmp_path / "train", bad_members())
    write_folder(tmp_path / "val", members(1))
    with pytest.raises(DataError, match="train: no image could be decoded: .*is empty"):
        SMALL.load(tmp_path)


def test_validation_must_have_the_classes_of_training(folder):
    write_folder(folder / "train", {"quince/0.png": encoded(picture())})
    write_folder(folder / "val", {"fig/0.png": encoded(picture())})
    message = "val: holds other classes than .*train: it lacks quince; it has fig besides"
    for method in (SMALL.prepare, SMALL.load, SMALL.load_test):
        with pytest.raises(DataError, match=message):
            method(folder)


def test_another_test_has_another_digest(folder):
    known = SMALL.load_test(folder).digest
    assert known
    assert SMALL.load_test(folder).digest == known
    (folder / "val" / "pear" / "1.png").unlink()
    assert SMALL.load_test(folder).digest != known


def held(count: int, seed: int = 0) -> ImageData:
    return ImageData(image_size=(24, 24), resize=24, held_out=count, split_seed=seed, workers=1)


def test_held_out_images_come_from_training_and_are_stratified(tmp_path):
    write_folder(tmp_path / "train", members(8))
    data = held(6)
    data.prepare(tmp_path)  # no val is needed
    training, validation = (split.samples for split in data.load(tmp_path))
    assert validation.labels.bincount().tolist() == [2, 2, 2]
    assert set(training.names) | set(validation.names) == set(members(8))
    assert not set(training.names) & set(validation.names)
    assert held(6).load(tmp_path)[1].samples.names == validation.names
    assert held(6, seed=1).load(tmp_path)[1].samples.names != validation.names
    with pytest.raises(DataError, match="holds no val images"):
        data.load_test(tmp_path)
    with pytest.raises(DataError, match="cannot hold out 24 of 24 images .* --data.held-out 0"):
        held(24).prepare(tmp_path)
    with pytest.raises(DataError, match="holds no val images"):
        data.check_test(tmp_path)
    with pytest.raises(DataError, match="holds no val images"):
        SMALL.prepare(tmp_path)


def test_stratified_shares_follow_the_classes():
    labels = np.repeat([0, 1, 2], [100, 50, 7])
    taken = stratified(labels, np.bincount(labels), 31, seed=0)
    assert np.bincount(labels[taken]).tolist() == [20, 10, 1]
    assert len(np.unique(taken)) == 31
    assert stratified(labels, np.bincount(labels), 157, seed=0) is None
    assert stratified(np.array([0, 0, 0, 1]), np.array([3, 1]), 3, seed=0) is None


def test_auto_storage_streams_what_does_not_fit(folder, monkeypatch):
    from fst.data import samples

    # 12 training images of 32 × 32 take 36,864 bytes; 6 of 24 × 24 take 10,368.
    monkeypatch.setattr("fst.data.samples._CPU_BYTES", 36_000)
    training, validation = (split.samples for split in SMALL.load(folder))
    assert isinstance(training, StreamedImages)
    assert isinstance(validation, ResidentImages)
    monkeypatch.setattr("fst.data.samples._CPU_BYTES", 36_864)
    assert isinstance(SMALL.load(folder)[0].samples, ResidentImages)
    monkeypatch.setattr(samples, "device_memory", lambda device: 30_000)
    forced = ImageData(image_size=(24, 24), resize=28, stored_size=32, storage="resident")
    with pytest.raises(DataError, match="12 images of 32 × 32 pixels take 0.0 GiB"):
        forced.prepare(folder)


@pytest.mark.parametrize(
    "settings",
    [
        {"image_size": (0, 8)},
        {"resize": 100},
        {"stored_size": 0},
        {"crop_scale": (0.5, 0.1)},
        {"crop_scale": (0.5, 1.5)},
        {"crop_ratio": (0.0, 1.0)},
        {"jitter": -0.1},
        {"erasing": 1.5},
        {"held_out": -1},
        {"workers": 0},
    ],
)
def test_settings_that_make_no_sense_are_named(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        ImageData(**settings)


class Shifted:
    """A transform that draws from Python's and PyTorch's generators, as timm's do."""

    def __call__(self, image):
        pixels = torch.from_numpy(View.evaluation((8, 8), 8)(image)) / 255
        return pixels + random.random() + 10 * torch.rand(())


def streamed(folder, workers: int = 0, transform=None) -> StreamedImages:
    images = find_split(folder, "train")
    return StreamedImages(images, View.evaluation((8, 8), 8), transform, workers=workers)


def plan(*steps: int):
    for step in steps:
        yield torch.from_numpy(np.random.default_rng(step).permutation(12)[:5]), 1000 + step


@pytest.mark.parametrize("workers", [0, 2])
def test_a_streamed_batch_is_a_function_of_its_rows_and_seed(folder, workers):
    samples = streamed(folder, workers, Shifted())
    before = random.getstate(), torch.get_rng_state()
    batches = list(samples.iterate(plan(0, 1, 2, 3)))
    if workers == 0:
        assert random.getstate() == before[0]
        assert torch.equal(torch.get_rng_state(), before[1])
    resumed = list(streamed(folder, 0, Shifted()).iterate(plan(2, 3)))
    for one, other in zip(batches[2:], resumed):
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.labels, other.labels)
    expected = [samples.labels[rows].tolist() for rows, _ in plan(0, 1, 2, 3)]
    assert [batch.labels.tolist() for batch in batches] == expected
    # The share of a second process: the same images, whoever decodes them.
    share = next(samples.iterate((rows[2:], seed) for rows, seed in plan(1)))
    assert torch.equal(share.images, batches[1].images[2:])
    # Another seed changes the image, and another row the draw.
    rows_0 = torch.tensor([0, 1, 0])
    first, second = samples.iterate(iter([(rows_0, 5), (rows_0, 6)]))
    assert not torch.allclose(first.images, second.images)
    assert torch.equal(first.images[0], first.images[2])


def test_a_plan_may_have_no_end(folder):
    def forever():
        while True:
            yield torch.tensor([0, 11]), 7

    labels = [batch.labels.tolist() for batch in islice(streamed(folder).iterate(forever()), 3)]
    assert labels == [[0, 2]] * 3


def test_streamed_evaluation_equals_resident_validation(folder):
    resident = SMALL.load_test(folder).samples
    forced = ImageData(image_size=(24, 24), resize=28, storage="streamed", workers=2)
    samples = forced.load_test(folder).samples
    assert isinstance(samples, StreamedImages)
    assert samples.names == resident.names
    expected = resident.batch(torch.tensor([4, 0, 2]))
    for batch in (
        samples.batch(torch.tensor([4, 0, 2])),
        next(samples.iterate(iter([(torch.tensor([4, 0, 2]), None)]))),
    ):
        assert torch.equal(batch.images, expected.images)
        assert torch.equal(batch.labels, expected.labels)
    with pytest.raises(ValueError, match="used as stored"):
        samples.batch(torch.tensor([0]), None, torch.zeros(1, 2))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_file_met_while_streaming_is_replaced_and_noted(tmp_path, workers, caplog):
    write_folder(tmp_path / "train", members() | bad_members())
    samples = streamed(tmp_path, workers)
    everything = torch.arange(15)
    first, second = samples.iterate(iter([(everything, 1), (everything, 2)]))
    assert first.labels.tolist() == [0] * 5 + [1] * 5 + [2] * 5  # the class stays
    assert torch.equal(first.images, second.images)
    names = [item.name for item in samples.skipped]
    assert sorted(names) == sorted(f"train/{name}" for name in bad_members())  # once each
    assert caplog.text.count("image skipped") == 3
    cut = samples.names.index("apple/cut.jpg")
    others = [row for row in range(5) if row != cut]
    assert any(torch.equal(first.images[cut], first.images[row]) for row in others)


def test_a_class_without_a_good_file_borrows_and_nothing_left_is_an_error(tmp_path):
    write_folder(tmp_path / "train", {"apple/0.png": b"", "apple/1.png": b"", **{
        name: data for name, data in members(1).items() if name.startswith("p")
    }})  # fmt: skip
    batch = streamed(tmp_path).batch(torch.tensor([0]))
    assert batch.labels.tolist() == [1]  # the label of the image that is shown
    write_folder(tmp_path / "train", dict.fromkeys(members(1), b""))
    with pytest.raises(DataError, match="none of 4 images .*; train/apple/0.png is empty"):
        streamed(tmp_path).batch(torch.tensor([0]))


def test_seeds_are_set_for_a_while():
    state = random.getstate()
    with seeded(1, 2):
        first = random.random(), torch.rand(())
    with seeded(1, 2):
        assert (random.random(), torch.rand(())) == first
    with seeded(1, 3):
        assert random.random() != first[0]
    assert random.getstate() == state


STREAMED = ImageData(image_size=(24, 24), resize=28, storage="streamed", workers=1)
FACTORY = "timm.data.transforms_factory"


def test_streamed_augmentation_says_what_to_install(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, FACTORY, None)  # as if it were not installed
    with pytest.raises(DataError, match=r"pip install 'function-space-transformer\[vision\]'"):
        STREAMED.load(folder, augment=True)
    STREAMED.load(folder)  # without augmentation neither is needed


def stand_in(monkeypatch, change):
    """In timm's place: standardised images, after a `change` of the one in [0, 1]."""
    asked = {}

    def create_transform(**settings):
        asked.update(settings)
        mean, deviation = (torch.tensor(settings[name])[:, None, None] for name in ("mean", "std"))

        def transform(image):
            pixels = torch.from_numpy(np.array(image.resize((24, 24)))).permute(2, 0, 1) / 255
            return (change(pixels) - mean) / deviation

        return transform

    for name in ("timm", "timm.data", FACTORY):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules[FACTORY], "create_transform", create_transform, raising=False)
    return asked


def test_streamed_augmentation_asks_timm_for_the_papers(folder, monkeypatch):
    asked = stand_in(monkeypatch, lambda pixels: pixels)
    samples = STREAMED.load(folder, augment=True)[0].samples
    assert asked["input_size"] == (3, 24, 24)
    assert asked["is_training"]
    assert asked["hflip"] == 0.5
    assert asked["auto_augment"] == "3a"
    assert asked["color_jitter"] == 0.3
    assert (asked["re_prob"], asked["re_mode"]) == (0.25, "pixel")
    # The model standardises by itself, so images come out in [0, 1] again.
    images = next(samples.iterate(iter([(torch.arange(12), 1)]))).images
    assert images.min() > -1e-5
    assert images.max() < 1 + 1e-5
    assert images.std() > 0.05


@pytest.mark.parametrize("workers", [1, 2])
def test_streamed_augmentation_is_a_function_of_the_seed(folder, monkeypatch, workers):
    """Whatever generator a transform draws from, and whatever else has drawn from it."""
    stand_in(monkeypatch, lambda pixels: pixels * random.random() + torch.rand(()))
    samples = replace(STREAMED, workers=workers).load(folder, augment=True)[0].samples
    everything = torch.arange(12)
    first, again, other = samples.iterate(iter([(everything, 1), (everything, 1), (everything, 2)]))
    assert torch.equal(first.images, again.images)
    assert not torch.allclose(first.images, other.images)
    part = next(samples.iterate(iter([(everything[5:7], 1)])))
    assert torch.equal(part.images, first.images[5:7])  # a share of the batch: the same images


@pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="torchvision is not installed"
)
def test_timm_augments_streamed_images_by_seed(folder):
    """timm itself; the three tests above are about what we ask of it."""
    samples = STREAMED.load(folder, augment=True)[0].samples
    steps = [(torch.arange(12), 1), (torch.arange(12), 1), (torch.arange(12), 2)]
    first, again, other = samples.iterate(iter(steps))
    assert first.images.shape == (12, 3, 24, 24)
    assert first.images.dtype == torch.float32
    assert torch.equal(first.images, again.images)
    assert not torch.allclose(first.images, other.images)
    # Erasing apart, an image lies in [0, 1].
    plain = ImageData(image_size=(24, 24), resize=28, storage="streamed", workers=1, erasing=0)
    images = next(plain.load(folder, augment=True)[0].samples.iterate(iter(steps))).images
    assert images.min() > -1e-5
    assert images.max() < 1 + 1e-5


def test_any_number_of_bad_files_is_passed_over(tmp_path):
    bad = {f"apple/{number:02d}.png": b"" for number in range(20)}
    bad |= {f"pear/{number:02d}.png": b"" for number in range(20)}
    write_folder(tmp_path / "train", bad | {"plum/0.png": encoded(picture("plum"))})
    assert streamed(tmp_path).batch(torch.tensor([0, 39])).labels.tolist() == [2, 2]


def test_a_class_of_which_nothing_can_be_decoded_is_an_error(tmp_path):
    write_folder(tmp_path / "train", members() | {"quince/0.png": b"", "quince/1.png": b"x"})
    data = ImageData(image_size=(8, 8), resize=8, held_out=3)
    with pytest.raises(DataError, match=r"train: no training image of quince can be decoded: "):
        data.load(tmp_path)


def test_a_twentieth_holds_one_of_each_class_that_has_two(tmp_path):
    files = {f"apple/{number}.png": encoded(picture()) for number in range(37)}
    files |= {f"pear/{number}.png": encoded(picture("pear")) for number in range(2)}
    write_folder(tmp_path / "train", files | {"plum/0.png": encoded(picture("plum"))})
    data = ImageData(image_size=(8, 8), resize=8, held_out=None)
    assert (
        data.count_held_out(find_split(tmp_path, "train")) == 2
    )  # a twentieth of 40, and both classes
    console = Console(record=True, width=500)
    training, validation = (split.samples for split in data.load(tmp_path, console=console))
    assert validation.labels.tolist() == [0, 1]
    assert sorted(set(training.labels.tolist())) == [0, 1, 2]
    # Held-out images come from the same folder: what they are for is said.
    text = console.export_text()
    assert "38 images of 3 classes for training" in text
    assert "2 images of 3 classes for validation" in text
    # Without `val` there is no test, and that is said before training.
    data.prepare(tmp_path, console=console)
    assert "holds no val images, so there will be no test" in console.export_text()


@pytest.mark.parametrize("total", [3, 4, 11, 60])
def test_small_classes_give_one_where_the_total_allows(total):
    labels = np.repeat([0, 1, 2], [97, 2, 3])
    taken = stratified(labels, np.bincount(labels), total, 0)
    assert len(taken) == total
    assert set(labels[taken]) == {0, 1, 2}
    counts = np.bincount(labels) - np.bincount(labels[taken])
    assert (counts > 0).all()
