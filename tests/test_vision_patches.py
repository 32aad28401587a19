"""Patches: where they lie, what they see, and what their encoder keeps in memory."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch.autograd.graph import saved_tensors_hooks

from fst.base import parameter_count
from fst.vision import PatchConfig, PatchEncoder, PatchGrid, cut


def test_patches_are_cut_row_by_row():
    images = torch.rand(2, 3, 8, 12)
    patches = cut(images, 4)
    assert patches.shape == (2, 6, 4, 4, 3)
    for index in range(6):
        y, x = 4 * (index // 3), 4 * (index % 3)
        expected = images[:, :, y : y + 4, x : x + 4].permute(0, 2, 3, 1)
        torch.testing.assert_close(patches[:, index], expected, rtol=0, atol=0)


def test_centres_and_bounds_tile_the_unit_box():
    grid = PatchConfig(("a", "b"), (8, 12), 4).grid
    assert grid == PatchGrid(2, 3)
    like = torch.zeros(1, dtype=torch.float64)
    low, high = grid.bounds(like)
    torch.testing.assert_close(grid.centres(like), (low + high) / 2)
    torch.testing.assert_close(high - low, torch.tensor([[1 / 2, 1 / 3]]).double().expand(6, 2))
    # Vertical comes first, and the horizontal position runs fastest, as the patches are cut.
    torch.testing.assert_close(low[1], torch.tensor([0, 1 / 3]).double())
    torch.testing.assert_close(low[3], torch.tensor([1 / 2, 0]).double())


@pytest.mark.parametrize(
    ("image_size", "patch_size", "message"),
    [
        ((224, 230), 16, "image_size must be a multiple of patch_size .16. .* got 224 by 230"),
        ((8, 8), 0, "patch_size must be at least 1, got 0"),
        ((0, 8), 4, "image_size must be a multiple .* got 0 by 8"),
        (224, 16, "image_size must be a tuple of 2, each a whole number, got 224"),
    ],
)
def test_sizes_that_do_not_fit_are_named(image_size, patch_size, message):
    with pytest.raises((ValueError, TypeError), match=message):
        PatchConfig(("a", "b"), image_size, patch_size)


def test_the_projection_commutes_with_the_mean():
    """The paper projects each pixel to the full width and then averages over the patch."""
    encoder = PatchEncoder(5, 7).double()
    patches = torch.rand(2, 6, 4, 4, 3, dtype=torch.float64)
    maps = encoder.blocks(F.gelu(encoder.stem(patches.flatten(0, 1).permute(0, 3, 1, 2))))
    projected = F.conv2d(maps, encoder.project.weight[:, :, None, None], encoder.project.bias)
    expected = projected.mean(dim=(2, 3)).unflatten(0, (2, 6))
    torch.testing.assert_close(encoder(patches), expected, rtol=1e-13, atol=1e-13)


def test_a_feature_sees_its_own_patch_alone():
    encoder = PatchEncoder(5, 7)
    images = torch.rand(1, 3, 8, 12)
    before = encoder(cut(images, 4))
    images[:, :, 4:, 4:8] += 1.0  # patch 4 of 6
    changed = (encoder(cut(images, 4)) - before).abs().amax(dim=-1)[0]
    assert changed[4] > 1e-3
    assert changed[[0, 1, 2, 3, 5]].max() == 0


def test_encoder_count_equals_the_specification():
    assert parameter_count(PatchEncoder(64, 200)) == 162_504


def test_the_first_features_keep_the_size_of_the_colours():
    """Without norms, a badly scaled start would leave the patches invisible beside positions."""
    features = PatchEncoder(64, 200)(torch.randn(4, 8, 16, 16, 3))
    assert 0.2 < features.square().mean().sqrt() < 5


def test_nine_maps_are_kept_for_the_backward():
    encoder, patches = PatchEncoder(16, 8), torch.rand(2, 6, 8, 8, 3)
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        features = encoder(patches)
    assert features.requires_grad
    pixels = patches.numel() // 3
    maps = [count for count in kept.values() if count == 16 * pixels]
    assert len(maps) == 9
    assert max(kept.values()) == 16 * pixels


def test_channels_stay_last_both_ways():
    """Otherwise every convolution would first copy the largest tensors of a training step."""
    encoder, orders = PatchEncoder(8, 12), []

    def note(module, arguments, output):
        kept = torch.channels_last
        orders.append(arguments[0].is_contiguous(memory_format=kept))
        output.register_hook(lambda g: orders.append(g.is_contiguous(memory_format=kept)))

    for module in encoder.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_hook(note)
    encoder(torch.randn(2, 3, 4, 4, 3)).square().sum().backward()
    assert orders == [True] * 10
