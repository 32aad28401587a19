"""Each augmentation against a plain one written with Pillow for one image, and its statistics."""

import math

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from fst.classifiers import IMAGENET_MEAN, IMAGENET_STD
from fst.data import ImageAugmentation
from fst.data.image_augmentation import (
    Boxes,
    blur_matrix,
    crop,
    cubic,
    erase,
    grey_or_solar,
    jitter,
    random_boxes,
    sampling_matrix,
)
from image_examples import CLASSES, picture

SIZE = (48, 40)
LEVEL = 1 / 255


def stored(count: int = 6, size: tuple[int, int] = (56, 56)) -> torch.Tensor:
    images = [picture(CLASSES[n % 3], n, size) for n in range(count)]
    noise = np.random.default_rng(0).integers(0, 60, (count, 3, *size))
    pixels = np.stack([np.asarray(image).transpose(2, 0, 1) for image in images])
    return torch.from_numpy((pixels.astype(int) + noise - 30).clip(0, 255).astype(np.uint8))


def to_pillow(image: torch.Tensor) -> Image.Image:
    """One 8-bit or [0, 1] image."""
    if image.dtype != torch.uint8:
        image = (image * 255).round().byte()
    return Image.fromarray(image.permute(1, 2, 0).numpy())


def from_pillow(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255


def close(result: torch.Tensor, expected: Image.Image, levels: float) -> None:
    difference = (result - from_pillow(expected)).abs()
    assert difference.max() <= levels * LEVEL


def boxes_of(rows: list[tuple[int, int, int, int]]) -> Boxes:
    return Boxes(*torch.tensor(rows, dtype=torch.float32).unbind(dim=1))


BOXES = [(0, 0, 56, 56), (3, 5, 20, 30), (30, 10, 26, 17), (11, 0, 45, 56), (55, 55, 1, 1),
         (7, 9, 48, 40)]  # fmt: skip


def test_a_crop_is_pillows_crop_and_bicubic_resize():
    images = stored() // 2 + 64  # where no filter overshoots: Pillow clips between the two axes
    flipped = torch.tensor([False, True] * 3)
    result = crop(images, boxes_of(BOXES), SIZE, flipped, None)
    for image, box, mirrored, got in zip(images, BOXES, flipped, result):
        top, left, height, width = box
        cut = to_pillow(image).crop((left, top, left + width, top + height))
        expected = cut.resize(SIZE[::-1], Image.Resampling.BICUBIC)
        # Pillow rounds to 8 bits between the two axes as well.
        close(got, ImageOps.mirror(expected) if mirrored else expected, levels=2)


def test_a_crop_of_the_models_size_is_exact():
    images = stored(6)
    result = crop(images, boxes_of([BOXES[-1]] * 6), SIZE, torch.zeros(6).bool(), None)
    torch.testing.assert_close(result, images[:, :, 7:55, 9:49] / 255, atol=1e-6, rtol=0)


def test_sampling_weights_sum_to_one_and_stay_inside_the_box():
    start, length = torch.tensor([3.0, 10.0]), torch.tensor([40.0, 7.0])
    weights = sampling_matrix(start, length, 56, 16)
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(2, 16))
    assert weights[0, :, :3].abs().max() == weights[0, :, 43:].abs().max() == 0
    # Enlarging reproduces parabolas where the filter lies inside the box: an order of three.
    pixels = torch.arange(56.0) + 0.5
    places = 10 + (torch.arange(16.0) + 0.5) * 7 / 16
    inside = (places > 12) & (places < 15)
    parabola = weights[1] @ (pixels - 13).square()
    torch.testing.assert_close(parabola[inside], (places - 13).square()[inside], atol=1e-4, rtol=0)


def test_the_cubic_kernel_interpolates():
    x = torch.tensor([0.0, 1.0, -1.0, 2.0, 3.0, 0.5])
    torch.testing.assert_close(cubic(x), torch.tensor([1.0, 0, 0, 0, 0, 0.5625]))


@pytest.mark.parametrize("deviation", [0.1, 0.7, 1.3, 2.0])
def test_blur_is_a_gaussian(deviation):
    matrix = blur_matrix(torch.tensor([deviation]), 41)[0]
    torch.testing.assert_close(matrix.sum(dim=-1), torch.ones(41))
    offset = torch.arange(41.0) - 20
    centre = matrix[20]
    if deviation >= 0.7:  # below, a pixel's grid is too coarse for the integral
        assert (centre * offset.square()).sum().sqrt().item() == pytest.approx(deviation, rel=2e-3)
    image = stored(1, (41, 41))
    whole = boxes_of([(0, 0, 41, 41)])
    still = torch.tensor([False])
    result = crop(image, whole, (41, 41), still, torch.tensor([deviation]))[0]
    # Pillow's own is made of box filters, and repeats the border: compare inside.
    blurred = to_pillow(image[0]).filter(ImageFilter.GaussianBlur(deviation))
    difference = (result - from_pillow(blurred))[:, 7:-7, 7:-7]
    spread = (image[0] / 255).std()
    assert difference.square().mean().sqrt() < 0.06 * spread
    assert difference.mean().abs() < LEVEL


def test_no_blur_is_exactly_none():
    assert torch.equal(blur_matrix(torch.zeros(2), 9), torch.eye(9).expand(2, 9, 9))


def test_grey_and_solarised_images_are_pillows():
    images = stored() / 255
    grey = torch.tensor([True, False, False] * 2)
    solar = torch.tensor([False, True, False] * 2)
    result = grey_or_solar(images, grey, solar)
    for number in (0, 3):
        close(result[number], to_pillow(images[number]).convert("L").convert("RGB"), levels=1)
    for number in (1, 4):
        close(result[number], ImageOps.solarize(to_pillow(images[number]), 128), levels=0.01)
    assert torch.equal(result[2::3], images[2::3])


ENHANCERS = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
ORDERS = [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]


def test_jitter_is_pillows_in_every_order():
    images = stored() / 255
    # The order matters only where values are clipped, hence strong changes too.
    factors = torch.linspace(0.5, 2.0, 18).reshape(6, 3)
    result = jitter(images, factors, torch.tensor(ORDERS))
    for image, factor, order, got in zip(images, factors, ORDERS, result):
        expected, exact = to_pillow(image), image.double()
        for which in order:
            expected = ENHANCERS[which](expected).enhance(factor[which].item())
            grey = 0.299 * exact[0] + 0.587 * exact[1] + 0.114 * exact[2]
            plainer = (0, grey.mean(), grey)[which]
            exact = (plainer + factor[which].item() * (exact - plainer)).clamp(0, 1)
        close(got, expected, levels=8)  # Pillow rounds down three times, amplified
        torch.testing.assert_close(got.double(), exact, atol=1e-6, rtol=0)
    other = jitter(images, factors, torch.tensor(ORDERS[::-1]))
    assert (other - result).abs().amax(dim=(1, 2, 3))[-1] > 0.05


def test_erased_boxes_hold_standard_normal_noise_and_nothing_else_changes():
    images = torch.full((4, 3, 60, 60), 0.5)
    boxes = boxes_of([(5, 10, 40, 30)] * 4)
    numbers = torch.tensor([[0.1, 0.2], [0.1, 0.2], [0.7, 0.3], [0.5, 0.5]])
    result = erase(images, boxes, torch.tensor([True, True, True, False]), numbers)
    inside = torch.zeros(60, 60, dtype=torch.bool)
    inside[5:45, 10:40] = True
    assert torch.equal(result[:3] != 0.5, inside.expand(3, 3, 60, 60))
    assert torch.equal(result[3], images[3])
    assert torch.equal(result[0], result[1])  # the same numbers, the same noise
    assert not torch.equal(result[0], result[2])
    mean, deviation = (torch.tensor(v)[:, None] for v in (IMAGENET_MEAN, IMAGENET_STD))
    noise = (result[0][:, inside] - mean) / deviation  # as the model sees it
    assert noise.mean().abs() < 4 / math.sqrt(3600)
    assert noise.std().item() == pytest.approx(1, abs=0.06)


def loop_box(random: np.random.Generator, size, area, ratio, largest) -> tuple | None:
    """timm's loop for one image."""
    for _ in range(10):
        target = random.uniform(*area) * size[0] * size[1]
        aspect = math.exp(random.uniform(math.log(ratio[0]), math.log(ratio[1])))
        height, width = round(math.sqrt(target / aspect)), round(math.sqrt(target * aspect))
        if height <= largest[0] and width <= largest[1]:
            return height, width
    return None


@pytest.mark.parametrize(
    ("area", "ratio", "shrink"),
    [((0.08, 1.0), (3 / 4, 4 / 3), 0), ((0.02, 1 / 3), (0.3, 1 / 0.3), 1)],
)
def test_boxes_follow_the_law_of_the_loop(area, ratio, shrink):
    size = (96, 96)
    largest = (size[0] - shrink, size[1] - shrink)
    boxes, found = random_boxes(torch.rand(20_000, 22), size, area, ratio, largest)
    random = np.random.default_rng(0)
    loop = [loop_box(random, size, area, ratio, largest) for _ in range(20_000)]
    assert found.float().mean().item() == pytest.approx(
        np.mean([box is not None for box in loop]), abs=2e-3
    )
    plain = np.array([box for box in loop if box is not None])
    height, width = boxes.height[found], boxes.width[found]
    for ours, theirs in (
        (height * width / 96**2, plain.prod(axis=1) / 96**2),
        ((width / height).log(), np.log(plain[:, 1] / plain[:, 0])),
        (height, plain[:, 0]),
    ):
        assert ours.mean().item() == pytest.approx(theirs.mean(), abs=4 * theirs.std() / 100)
        assert ours.std().item() == pytest.approx(theirs.std(), rel=0.03)
    assert ((boxes.top >= 0) & (boxes.top + boxes.height <= 96))[found].all()
    assert ((boxes.left >= 0) & (boxes.left + boxes.width <= 96))[found].all()
    # Uniform over the places that there are.
    share = boxes.top[found] / (96 - height).clamp(min=1)
    assert share[height < 80].mean().item() == pytest.approx(0.5, abs=0.01)


def test_a_crop_that_never_fits_is_the_whole_image():
    wide = ImageAugmentation((8, 8), crop_scale=(1.0, 1.0), crop_ratio=(1.3, 1.4))
    boxes = wide.crops(torch.rand(5, 22), (40, 40))
    whole = torch.tensor([0.0, 0.0, 40.0, 40.0]).expand(5, 4)
    assert torch.equal(torch.stack([boxes.top, boxes.left, boxes.height, boxes.width], 1), whole)


SETTINGS = ImageAugmentation(SIZE)


def draw(count: int, seed: int = 0) -> torch.Tensor:
    return SETTINGS.draw(count, torch.Generator().manual_seed(seed))


def test_the_result_depends_on_the_images_own_numbers_alone():
    images, numbers = stored(), draw(6)
    whole = SETTINGS(images, numbers)
    assert whole.shape == (6, 3, *SIZE)
    assert whole.dtype == torch.float32
    torch.testing.assert_close(SETTINGS(images, numbers), whole, atol=0, rtol=0)
    parts = torch.cat([SETTINGS(images[:1], numbers[:1]), SETTINGS(images[1:], numbers[1:])])
    torch.testing.assert_close(parts, whole, atol=1e-5, rtol=0)
    assert not torch.allclose(SETTINGS(images, draw(6, seed=1)), whole, atol=0.05)


def test_shares_of_flips_kinds_and_erasings():
    count = 2_000
    # A grey ramp to the right: its slope tells a flip, its brightness the rest.
    ramp = torch.linspace(60, 100, 24).byte().expand(count, 3, 24, 24).contiguous()
    numbers = draw(count)
    plain = ImageAugmentation((24, 24), three_augment=False, jitter=0, erasing=0)
    falling = plain(ramp, numbers).diff(dim=3).mean(dim=(1, 2, 3)) < 0
    assert falling.float().mean().item() == pytest.approx(0.5, abs=0.04)
    erasing = ImageAugmentation((24, 24), three_augment=False, jitter=0)
    erased = (erasing(ramp, numbers) != plain(ramp, numbers)).any(dim=1)
    share = erased.flatten(1).any(dim=1)
    assert share.float().mean().item() == pytest.approx(0.25, abs=0.03)
    assert erased[share].float().mean().item() == pytest.approx((0.02 + 1 / 3) / 2, abs=0.02)


def test_three_augment_does_one_of_three_to_every_image():
    count = 900
    random = np.random.default_rng(0)
    images = torch.from_numpy(random.integers(0, 256, (count, 3, 16, 16), dtype=np.uint8))
    numbers = draw(count)
    settings = {"image_size": (16, 16), "jitter": 0, "erasing": 0, "crop_scale": (1.0, 1.0)}
    plain = ImageAugmentation(three_augment=False, **settings)(images, numbers)
    result = ImageAugmentation(**settings)(images, numbers)
    grey = (result.amax(dim=1) == result.amin(dim=1)).all(dim=(1, 2))
    solarised = torch.where(plain >= 0.5, 1 - plain, plain)
    solar = ((result - solarised).abs() < 1e-5).all(dim=1).all(dim=(1, 2))
    blurred = ~grey & ~solar
    for share in (grey, solar, blurred):
        assert share.float().mean().item() == pytest.approx(1 / 3, abs=0.05)
    assert (result[blurred].var(dim=(1, 2, 3)) <= plain[blurred].var(dim=(1, 2, 3)) + 1e-4).all()


def test_off_means_the_centre_is_left_as_it_is():
    images = stored(4, (24, 24))
    nothing = ImageAugmentation((24, 24), crop_scale=(1.0, 1.0), crop_ratio=(1.0, 1.0), flip=0,
                                three_augment=False, jitter=0, erasing=0)  # fmt: skip
    torch.testing.assert_close(nothing(images, draw(4)), images / 255, atol=1e-6, rtol=0)
