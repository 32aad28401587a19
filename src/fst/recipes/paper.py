"""The paper's test errors, to stand beside ours (Tables 2 to 8 and 14 of the paper)."""

from fst.data.burgers import VISCOSITIES

BURGERS_GRIDS = ((32, 32), (64, 64), (128, 128), (201, 1024))

BURGERS_SINGLE = {
    "FST": (0.04118, 0.04159, 0.04171, 0.04185),
    "FNO": (0.02854, 0.02950, 0.02963, 0.02974),
    "Perceiver IO": (0.25634, 0.25465, 0.25396, 0.25381),
    "Transolver": (0.17709, 0.07151, 0.06569, 0.06154),
    "DeepONet": (0.24712, 0.25204, 0.25467, 0.25581),
}
"""ν = 0.01 on each of `BURGERS_GRIDS`."""

BURGERS_ALL = {"FST": 0.018180, "FNO": 0.018528, "Perceiver IO": 0.073293}
"""All viscosities, full grid."""

DARCY = {
    "FST": 0.03173,
    "FNO": 0.03167,
    "Perceiver IO": 0.10102,
    "Transolver": 0.03671,
    "DeepONet": 0.14678,
}
"""Full 128 × 128 grid."""

BURGERS_BY_VISCOSITY = {
    "FST": (
        *(0.044195, 0.033692, 0.027352, 0.021308, 0.013957, 0.013382),
        *(0.011940, 0.010567, 0.010670, 0.010242, 0.010076, 0.010131),
    ),
    "FNO": (
        *(0.048623, 0.036266, 0.031828, 0.024882, 0.015056, 0.013013),
        *(0.010499, 0.009262, 0.008588, 0.007883, 0.007991, 0.007632),
    ),
    "Perceiver IO": (
        *(0.147162, 0.120887, 0.112725, 0.088623, 0.063128, 0.061419),
        *(0.059270, 0.043572, 0.044528, 0.044719, 0.041947, 0.049411),
    ),
}
"""All-viscosity models, full grid, in the order of `VISCOSITIES`."""


def viscosity_groups(model: str) -> tuple[tuple[str, float], ...]:
    """The paper's error of each viscosity, by the name that the Burgers test split gives it."""
    errors = BURGERS_BY_VISCOSITY[model]
    return tuple((str(nu), error) for nu, error in zip(VISCOSITIES, errors, strict=True))


IMAGENET = {"FST": (0.69530, 0.89042), "ViT": (0.67804, 0.88126), "CNN-ViT": (0.61052, 0.83478)}
"""Top-1 and top-5 accuracy on the ImageNet-1K validation images (Table 8)."""


def imagenet_errors(model: str) -> tuple[float, ...]:
    """The shares of wrong answers that these accuracies leave."""
    return tuple(round(1 - accuracy, 6) for accuracy in IMAGENET[model])
