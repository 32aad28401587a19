"""Which kernels run where: those for Hopper and what replaces them, and the GPU they run on."""

from contextlib import contextmanager

import pytest
import torch

from compiling import SHARED, shared_memory, unended_barriers

mlp = pytest.importorskip("fst.kernels.mlp")
hopper = pytest.importorskip("fst.kernels.hopper")
operator = pytest.importorskip("fst.kernels.operators").operator


class OnGPU(torch.Tensor):
    """Claims to be there."""

    is_cuda = True


def test_the_kernels_for_hopper_compile(tmp_path):
    pytest.importorskip("triton.experimental.gluon")
    needed = shared_memory("hopper_compilation.py", tmp_path)
    assert len(needed) == 7
    assert max(needed) <= SHARED
    assert unended_barriers(tmp_path) == []


@pytest.mark.parametrize(
    ("tokens", "width", "groups"),
    [(49152, 176, 3), (24576, 176, 3), (12288, 176, 2), (49152, 200, 3), (49152, 248, 2)],
)
def test_plans_leave_few_processors_idle_and_fit(tokens, width, groups):
    kernels = pytest.importorskip("fst.kernels.feed_forward_hopper")
    for place in (0, 1, 2):
        plan = kernels.plan(tokens, width, place, 132)
        assert plan.groups == groups
        assert plan.stages >= 2  # a step is fetched while another is multiplied


@pytest.mark.parametrize("width", range(128, 249, 8))
def test_tiles_hold_the_channels_and_what_the_products_want_behind_them(width):
    kernels = pytest.importorskip("fst.kernels.feed_forward_hopper")
    packing = pytest.importorskip("fst.kernels.feed_forward_packing")
    widths = kernels.tiles_of(width)
    assert width + packing.EXTRA <= sum(widths) <= sum(packing.tile_widths(width))


def test_places_are_copied_where_tiles_do_not_wrap():
    kernels = pytest.importorskip("fst.kernels.feed_forward_hopper")
    place = torch.zeros(200, 64, dtype=torch.bfloat16)
    assert kernels.way_of(None, 400) == 0
    assert kernels.way_of(place, 400) == 1
    assert kernels.way_of(place, 200) == 2
    assert kernels.way_of(place[:128], 256) == 2
    assert kernels.way_of(place.flatten()[4:-60].view(-1, 64), 199) == 1  # begins at 8 bytes


def test_without_the_kernels_for_hopper_others_run(monkeypatch):
    """A failure warns once, and is not tried again."""
    monkeypatch.setattr(hopper, "_given_up", set())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    x = torch.zeros(4, 176, dtype=torch.bfloat16).as_subclass(OnGPU)
    tried = []

    def launch():
        tried.append(1)
        raise AttributeError("no such name")

    with pytest.warns(UserWarning, match="for Hopper do not work.*AttributeError: no such name"):
        assert not mlp._hopper_took(launch, x)
    assert not mlp._hopper_took(launch, x)
    assert len(tried) == 1
    monkeypatch.setattr(hopper, "_given_up", {"attention"})  # the others are not concerned
    assert mlp._hopper_took(lambda: None, x)
    assert not mlp._hopper_took(launch, x[:, :64])  # too narrow
    assert not mlp._hopper_took(launch, x.half())
    shifted = torch.zeros(712, dtype=torch.bfloat16)[1:705].view(4, 176)
    assert not mlp._hopper_took(launch, x, shifted)  # it begins at two bytes
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
    assert not mlp._hopper_took(launch, x)


def test_a_full_gpu_is_not_the_kernels_fault(monkeypatch):
    monkeypatch.setattr(hopper, "_given_up", set())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    x = torch.zeros(4, 176, dtype=torch.bfloat16).as_subclass(OnGPU)

    def launch():
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        mlp._hopper_took(launch, x)
    assert not hopper._given_up


def test_operators_run_on_the_gpu_that_holds_the_tensors(monkeypatch):
    entered = []

    @contextmanager
    def device(which):
        entered.append(which)
        yield
        entered.append("left")

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(OnGPU, "get_device", lambda tensor: 0, raising=False)

    @operator("fst_tests::doubled")
    def doubled(values: torch.Tensor) -> torch.Tensor:
        entered.append("ran")
        return 2 * values

    assert doubled(torch.ones(2)).tolist() == [2, 2]
    assert entered == ["ran"]
    run = doubled.definition._init_fn
    run(torch.ones(2).as_subclass(OnGPU))
    assert entered[1:] == [torch.device("cpu"), "ran", "left"]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    run(torch.ones(2).as_subclass(OnGPU))
    assert entered[4:] == ["ran"]
