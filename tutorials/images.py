"""Images.

The same layer reads images: patches are the observations, anchors move along the rows of the image,
and their mean feature gives the scores of the classes.
"""

# %%
# ## Pictures of shapes
#
# Bright discs, squares and crosses of random size and position on a dark, noisy background, 32 × 32
# pixels.
import torch
from matplotlib import pyplot as plt

from fst.vision import ImageClassifier, ImageClassifierConfig

STEPS = 500  # 2 in tests

torch.manual_seed(0)
NAMES = ("cross", "disc", "square")
row, column = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")


def draw(count):
    """Images (count 3 32 32) between 0 and 1, and the numbers of their classes."""
    labels = torch.randint(3, (count,))
    centre, size = 9 + 14 * torch.rand(2, count, 1, 1), 4 + 4 * torch.rand(count, 1, 1)
    down, right = (row - centre[0]).abs(), (column - centre[1]).abs()
    shapes = torch.stack(
        (
            (torch.minimum(down, right) < size / 3) & (torch.maximum(down, right) < size),
            down.square() + right.square() < size.square(),
            torch.maximum(down, right) < 0.9 * size,
        )
    )
    chosen = shapes[labels, torch.arange(count)][:, None]
    ground, colour = 0.3 * torch.rand(count, 3, 1, 1), 0.6 + 0.4 * torch.rand(count, 3, 1, 1)
    images = torch.where(chosen, colour, ground) + 0.05 * torch.randn(count, 3, 32, 32)
    return images.clamp(0, 1), labels


# %%
# ## A small classifier
#
# 64 patches of 4 × 4 pixels, 8 rows of 8 anchors, two refinement steps.
model = ImageClassifier(
    ImageClassifierConfig(
        class_names=NAMES,
        image_size=(32, 32),
        patch_size=4,
        channels=16,
        width=48,
        heads=4,
        fourier_bands=8,
        rows=8,
        anchors_per_row=8,
        predictor_width=32,
        predictor_blocks=1,
        refinement_steps=2,
        points_from_sobol=48,
    )
)
matrices = [p for p in model.parameters() if p.ndim == 2]
others = [p for p in model.parameters() if p.ndim != 2]
optimizers = [
    torch.optim.Muon(matrices, lr=3e-3, weight_decay=0, adjust_lr_fn="match_rms_adamw"),
    torch.optim.Adam(others, lr=3e-3),
]
schedules = [torch.optim.lr_scheduler.OneCycleLR(o, 3e-3, STEPS) for o in optimizers]
for _ in range(STEPS):
    images, labels = draw(32)
    loss = torch.nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    for optimizer, schedule in zip(optimizers, schedules, strict=True):
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()

model.eval()
images, labels = draw(256)
with torch.no_grad():
    scores = model(images)
print(
    f"right on {(scores.argmax(dim=1) == labels).float().mean():.1%} of 256 new images; chance is 33.3%"
)

# %%
# ## Where the anchors stand
#
# Dots are anchors. They may move along their rows; before training they are evenly spaced.
with torch.no_grad():
    anchors = model.represent(images[:6]).anchors.positions
figure, axes = plt.subplots(1, 6, figsize=(10, 2), layout="constrained")
for ax, image, places, guess in zip(axes, images, anchors, scores.argmax(dim=1), strict=False):
    ax.imshow(image.permute(1, 2, 0), extent=(0, 1, 1, 0))
    ax.plot(places[:, 1], places[:, 0], "w.", markersize=3)
    ax.set(title=NAMES[int(guess)], xticks=[], yticks=[])
plt.show()

# %%
# ## Your own images
#
# For photographs in class folders use the command line: `fst train own/images-fst --data FOLDER`,
# see [Images](../images.md). It augments, validates, saves and resumes.
