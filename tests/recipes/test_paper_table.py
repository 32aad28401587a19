"""Every setting of the paper's recipes, in one table taken from its appendix.

A setting is either in the table or named as ours: a new one has to be put into one of the two.
"""

import pytest

from fst.io import flat
from fst.recipes import RECIPES, find

# How fast a run goes, and what is kept and shown of it; the optimiser that the paper does not use.
OURS = {
    "name", "task", "model_name", "data_folder", "model.class_names", "model.kind", "model.low",
    "model.high", "model.value_channels", "model.output_channels", "model.condition_width",
    "model.fourier_bands", "model.fourier_spacing",  
    "data.kind", "data.seed", "data.fine", "data.symmetries", "data.storage", "data.stored_size",
    "data.workers", "data.crop_scale", "data.crop_ratio", "training.accumulate",
    "training.compile", "training.compile_mode", "training.log_every", "training.checkpoint_every",
    "training.keep", "training.tensorboard", "training.wandb", "training.momentum",
    "training.matrix_rate", "evaluation.kind", "evaluation.pictures", "evaluation.view.samples",
    "evaluation.view.axis_names", "evaluation.view.axis_ends", "evaluation.view.profiles",
}  # fmt: skip

# Appendix A: the architecture of FST.
FST = {
    "width": 176, "heads": 8, "rows": (32,), "adaptive_axis": 1, "anchors_per_row": 32,
    "predictor_width": 144, "predictor_heads": 4, "predictor_blocks": 2, "refinement_steps": 4,
    "points_from_anchors": 256, "points_from_sobol": 256, "prediction_points": "as-trained",
    "resample_points": True,
    "coordinates": "adaptive", "length_scales": "adaptive", "update": "function-space",
    "observe": "every-step", "condition_channels": 0, "log_condition": False,
}  # fmt: skip
BURGERS_SEEDS = {"anchor_seed": 2026091322, "sobol_seed": 2026091323}
DARCY_SEEDS = {"anchor_seed": 2026391325, "sobol_seed": 2026491325}
VISCOSITY = {"condition_channels": 1, "log_condition": True}
PERCEIVER = {"width": 240, "layers": 6, "heads": 8, "latents": 256}
NO_CONDITION = {"condition_channels": 0, "log_condition": False}
TRANSOLVER = {"width": 328, "layers": 5, "heads": 8, "slices": 32}
FNO = {
    "width": 48, "layers": 4, "modes": (10, 30), "grid": (201, 1024), "mask_channel": True,
    "odd_axes": "published",
}  # fmt: skip
GRIDS = ((32, 32), (64, 64), (128, 128), (201, 1024))
NEIGHBORS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)

# What all solutions of equations share: Appendices B and C.
OPERATORS = {
    "model.prediction_symmetry": "none",
    "training.objective.kind": "RelativeL2", "training.objective.channels": "original",
    "training.objective.scale": "relative", "training.objective.weights": (),
    "training.optimizer": "adam",
    "training.weight_decay": 0.0, "training.epsilon": 1e-8, "training.batch_size": 48,
    "training.precision": "bf16", "training.seed": 2026091311, "training.average": None,
    "training.augment": False, "training.validation_batch": 8, "evaluation.batch_size": 8,
}  # fmt: skip


def seeds(values: dict, reset: str) -> dict:
    """The evaluation points of validation and test, and when they start anew."""
    found = {f"evaluation.{name}": value for name, value in values.items()}
    found |= {f"training.validation_{name}": value for name, value in values.items()}
    return found | {"evaluation.reset": reset, "training.validation_reset": reset}


BURGERS = OPERATORS | seeds(BURGERS_SEEDS, "grid") | {
    "data.training": 2000, "data.validation": 100, "data.points": 1024, "data.times": 201,
    "data.final_time": 2.0, "data.split_seed": 0, "training.clip": None,
}  # fmt: skip
SINGLE = BURGERS | {
    "data.viscosities": (0.01,), "data.test": 84, "data.condition": False,
    "training.schedule.kind": "Plateau", "training.schedule.warmup": 1000,
    "training.schedule.divisor": 10.0, "training.schedule.floor": 0.01,
    "training.schedule.improvement": 0.01, "training.schedule.window": 6000,
    "training.schedule.smoothing": 1, "training.schedule.stop_improvement": 0.005,
    "training.schedule.stop_window": 12_000, "training.schedule.minimum": 20_000,
    "training.schedule.maximum": 250_000, "training.validate_every": 2000,
    "training.predictor_learning_rate": None, "standardization": None,
    "evaluation.grids": GRIDS, "evaluation.paper_groups": (),
}  # fmt: skip
ALL = BURGERS | {
    "data.viscosities": (0.001, 0.002, 0.004, 0.01, 0.02, 0.04, 0.1, 0.2, 0.4, 1.0, 2.0, 4.0),
    "data.test": 1000, "data.condition": True, "data.validation_grid": (100, 100),
    "training.schedule.kind": "Stages", "training.schedule.stop_improvement": 0.01,
    "training.schedule.stop_window": 50_000, "training.schedule.stop_every": 50_000,
    "training.schedule.minimum": 250_000, "training.schedule.maximum": 1_000_000,
    "training.validate_every": 5000, "standardization": (-0.012048, 0.621534),
    "evaluation.grids": GRIDS[-1:], "evaluation.neighbors": (),
}  # fmt: skip
DECAY = {
    "training.schedule.stages": (
        {"end": 200_000, "first": 1.0, "last": 1.0, "shape": "linear"},
        {"end": 250_000, "first": 1.0, "last": 0.05, "shape": "cosine"},
    ),
    "training.schedule.after": 0.05,
}
CONSTANT = {"training.schedule.stages": (), "training.schedule.after": 1.0}
DARCY = OPERATORS | seeds(DARCY_SEEDS, "batch") | {
    "data.training": 2000, "data.validation": 100, "data.test": 1000, "data.training_file": 5000,
    "data.split_seed": 2026092001, "data.resolution": 128, "data.validation_grid": (100, 100),
    "training.clip": 1.0, "training.queries": None,
    "training.schedule.kind": "Plateau", "training.schedule.warmup": 1000,
    "training.schedule.divisor": 2.0, "training.schedule.floor": 0.01,
    "training.schedule.improvement": 0.01, "training.schedule.window": 4000,
    "training.schedule.smoothing": 3, "training.schedule.stop_improvement": 0.005,
    "training.schedule.stop_window": 12_000, "training.schedule.minimum": 0,
    "training.schedule.maximum": 250_000, "training.validate_every": 2000,
    "training.predictor_learning_rate": None, "standardization": None,
    "evaluation.grids": ((128, 128),), "evaluation.paper_groups": (),
}  # fmt: skip
IMAGENET = seeds(BURGERS_SEEDS, "grid") | {
    "data.image_size": (224, 224), "data.resize": 256, "data.flip": 0.5,
    "data.three_augment": True, "data.jitter": 0.3, "data.erasing": 0.25, "data.held_out": 0,
    "data.split_seed": 0, "model.image_size": (224, 224), "model.patch_size": 16,
    "training.objective.kind": "CrossEntropy", "training.objective.label_smoothing": 0.1,
    "training.optimizer": "adamw", "training.weight_decay": 0.05, "training.epsilon": 1e-8,
    "training.batch_size": 256, "training.precision": "bf16", "training.clip": 1.0,
    "training.seed": 20260820, "training.learning_rate": 1e-3, "training.queries": None,
    "training.augment": True, "training.average": None, "training.validate_every": 5000,
    "training.validation_batch": 100, "training.schedule.kind": "Stages",
    "training.schedule.after": 0.0025, "training.schedule.stop_improvement": 0.01,
    "training.schedule.stop_window": 50_000, "training.schedule.stop_every": 1,
    "training.schedule.minimum": 0, "training.schedule.maximum": 600_456,
    "evaluation.batch_size": 100, "standardization": None,
}  # fmt: skip
del IMAGENET["evaluation.reset"]
STAGED = (
    {"end": 25_023, "first": 0.0, "last": 1.0, "shape": "linear"},
    {"end": 500_456, "first": 1.0, "last": 0.05, "shape": "cosine"},
    {"end": 550_456, "first": 0.05, "last": 0.0, "shape": "cosine"},
)
DROPPED = (STAGED[0], {"end": 500_000, "first": 0.05, "last": 0.0025, "shape": "cosine"})

BY_VISCOSITY = {
    "FST": "0.044195 0.033692 0.027352 0.021308 0.013957 0.013382 "
    "0.011940 0.010567 0.010670 0.010242 0.010076 0.010131",
    "FNO": "0.048623 0.036266 0.031828 0.024882 0.015056 0.013013 "
    "0.010499 0.009262 0.008588 0.007883 0.007991 0.007632",
    "Perceiver IO": "0.147162 0.120887 0.112725 0.088623 0.063128 0.061419 "
    "0.059270 0.043572 0.044528 0.044719 0.041947 0.049411",
}


def entry(shared, model, rate, parameters, errors, **more):
    """One recipe: what its task shares, its model, and what is its own."""
    found = shared | {f"model.{name}": value for name, value in model.items()}
    found |= {"paper_parameters": parameters, "evaluation.paper_errors": errors}
    found |= {"training.learning_rate": rate, "paper_error": errors[-1] if errors else None}
    return found | {name.replace("__", "."): value for name, value in more.items()}


def single(model, rate, parameters, errors, grid=64, queries=2500, neighbors=()):
    return entry(
        SINGLE, model, rate, parameters, errors, training__queries=queries,
        data__supervision_grid=(100, 100) if queries else None,
        data__validation_grid=(grid, grid), evaluation__neighbors=neighbors,
    )  # fmt: skip


def everywhere(paper_name, model, rate, parameters, error, schedule, queries=2500, predictor=None):
    numbers = map(float, BY_VISCOSITY[paper_name].split())
    names = map(str, ALL["data.viscosities"])
    return entry(
        ALL | schedule, model, rate, parameters, (error,), training__queries=queries,
        data__supervision_grid=(100, 100) if queries else None,
        training__predictor_learning_rate=predictor,
        evaluation__paper_groups=tuple(zip(names, numbers, strict=True)),
    )  # fmt: skip


def darcy(model, rate, parameters, error, neighbors=()):
    return entry(DARCY, model, rate, parameters, (error,), evaluation__neighbors=neighbors)


def imagenet(model, parameters, errors, stages=STAGED, predictor=None):
    return entry(
        IMAGENET, model, 1e-3, parameters, errors, paper_error=errors[0],
        training__schedule__stages=stages, training__predictor_learning_rate=predictor,
    )  # fmt: skip


def ablation(error, **model):
    found = single(
        FST | BURGERS_SEEDS | {"length_scales": "fixed"} | model, 1e-3, None, (error,), 100
    )
    return found | {"evaluation.grids": GRIDS[-1:]}


SIXTEEN = {
    "rows": (16,), "anchors_per_row": 16, "points_from_anchors": 128, "points_from_sobol": 384,
}  # fmt: skip
SINGLE_FST = (0.04118, 0.04159, 0.04171, 0.04185)
FNO_DARCY = FNO | {"width": 50, "modes": (16, 16), "grid": (128, 128), "mask_channel": False}
DEEPONET = {"observations": 1424, "branch": (918, 918), "trunk": (918, 918)}
DEEPONET_DARCY = {
    "observations": 16_384, "branch": (160, 256, 256, 256), "trunk": (256, 256, 256, 256),
}  # fmt: skip
IMAGE_FST = {
    "width": 200, "heads": 8, "rows": 32, "anchors_per_row": 32, "predictor_width": 104,
    "predictor_heads": 4, "predictor_blocks": 2, "refinement_steps": 4,
    "points_from_sobol": 512, "sobol_seed": 2026091323, "channels": 64,
}  # fmt: skip
VIT = {"width": 176, "layers": 10, "heads": 4, "hidden": 423}
CNN_VIT = VIT | {"encoder_width": 200, "channels": 64}

TABLE = {
    "burgers-single/fst": single(
        FST | BURGERS_SEEDS, 1e-3, 2_830_721, SINGLE_FST, 100, neighbors=NEIGHBORS
    ),
    "burgers-single/fno": single(
        FNO | NO_CONDITION, 3e-3, 2_978_161, (0.02854, 0.02950, 0.02963, 0.02974), 100, None
    ),
    "burgers-single/perceiver-io": single(
        PERCEIVER | NO_CONDITION, 3e-4, 2_936_881, (0.25634, 0.25465, 0.25396, 0.25381)
    ),
    "burgers-single/transolver": single(
        TRANSOLVER, 3e-4, 2_956_424, (0.17709, 0.07151, 0.06569, 0.06154)
    ),
    "burgers-single/deeponet": single(
        DEEPONET, 3e-4, 2_998_189, (0.24712, 0.25204, 0.25467, 0.25581)
    ),
    "burgers-all/fst": everywhere(
        "FST", FST | BURGERS_SEEDS | VISCOSITY, 1e-3, 2_900_721, 0.018180, DECAY, predictor=1e-5
    ),
    "burgers-all/fno": everywhere("FNO", FNO | VISCOSITY, 5e-3, 2_978_257, 0.018528, DECAY, None),
    "burgers-all/perceiver-io": everywhere(
        "Perceiver IO", PERCEIVER | VISCOSITY, 1e-5, 2_995_201, 0.073293, CONSTANT
    ),
    "darcy/fst": darcy(FST | DARCY_SEEDS, 1e-3, 2_830_721, 0.03173, NEIGHBORS),
    "darcy/fno": darcy(FNO_DARCY | NO_CONDITION, 5e-3, 2_911_351, 0.03167),
    "darcy/perceiver-io": darcy(PERCEIVER | NO_CONDITION, 3e-4, 2_936_881, 0.10102),
    "darcy/transolver": darcy(TRANSOLVER | {"grid": (128, 128)}, 1e-3, 2_955_768, 0.03671),
    "darcy/deeponet": darcy(DEEPONET_DARCY, 1e-3, 2_992_545, 0.14678),
    "imagenet/fst": imagenet(IMAGE_FST, 2_959_929, (0.3047, 0.10958), predictor=1e-5),
    "imagenet/vit": imagenet(VIT, 3_095_614, (0.32196, 0.11874)),
    "imagenet/cnn-vit": imagenet(CNN_VIT, 3_158_150, (0.38948, 0.16522), DROPPED),
    "ablation/anchors-uniform-fixed-32": ablation(0.04604, coordinates="uniform"),
    "ablation/anchors-uniform-fixed-16": ablation(0.04571, coordinates="uniform", **SIXTEEN),
    "ablation/anchors-adaptive-fixed-32": ablation(0.04069),
    "ablation/anchors-adaptive-fixed-16": ablation(0.05784, **SIXTEEN),
    "ablation/anchors-uniform-adaptive-32": ablation(
        0.05482, coordinates="uniform", length_scales="adaptive"
    ),
    "ablation/anchors-uniform-adaptive-16": ablation(
        0.05094, coordinates="uniform", length_scales="adaptive", **SIXTEEN
    ),
    "ablation/anchors-adaptive-adaptive-32": ablation(0.04185, length_scales="adaptive"),
    "ablation/anchors-adaptive-adaptive-16": ablation(0.04480, length_scales="adaptive", **SIXTEEN),
    "ablation/update-anchor-attention": ablation(0.05212, update="anchor-attention"),
    "ablation/refine-1": ablation(0.06209, refinement_steps=1),
    "ablation/refine-2": ablation(0.04442, refinement_steps=2),
    "ablation/refine-4": ablation(0.04069),
    "ablation/refine-8": ablation(0.06496, refinement_steps=8),
    "ablation/observe-first": ablation(0.05971, observe="first-step"),
}


def plain(value):
    """Lists and tuples alike, whatever is in them."""
    return tuple(map(plain, value)) if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("name", TABLE)
def test_a_recipe_is_the_papers(name):
    found = {key: plain(value) for key, value in flat(find(name).to_json()).items()}
    assert {key: value for key, value in found.items() if key not in OURS} == TABLE[name]


def test_every_recipe_of_the_paper_is_in_the_table():
    ours = ("demo/", "own/", "fast/", "minute/")
    assert {name for name in RECIPES if not name.startswith(ours)} == set(TABLE)
