"""Training with Accelerate.

[Accelerate](https://huggingface.co/docs/accelerate) runs one loop on a CPU, a GPU or many of them.
It is installed with this package, whose own trainer uses it too. The same holds for Lightning: what
matters is the small module below.
"""

# %%
# ## One module with one forward
#
# A model of this package answers in two steps: observations to a field, then queries to values.
# Distributed training and compilers wrap a module and see only what happens inside its `forward`.
# So put both steps into one module. The loss may stay outside.
import torch
from accelerate import Accelerator
from matplotlib import pyplot as plt
from torch.utils.data import DataLoader, TensorDataset

import fst
from fst.metrics import relative_l2, squared_relative_l2

EPOCHS = 30  # 1 in tests
SAMPLES = 640  # 32 in tests

torch.manual_seed(0)


class AtQueries(torch.nn.Module):
    """Values at the queries, from observations that are given as plain tensors."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, positions, values, queries):
        return self.model(fst.Observations(positions, values))(queries)


# %%
# ## Data
#
# Heat on a rod: the temperature at time 0 is seen at 30 random points, and wanted at any later
# time. Each of four modes decays at a rate of its own, so the solution is a formula.
ORDER = torch.pi * torch.arange(1, 5)


def temperature(amplitudes, positions):
    """At positions (time, space), for amplitudes (b 4)."""
    time, space = positions[..., :1], positions[..., 1:]
    modes = torch.exp(-0.1 * ORDER.square() * time) * torch.sin(ORDER * space)
    return (amplitudes[:, None] * modes).sum(dim=-1, keepdim=True)


amplitudes = torch.randn(SAMPLES, 4)
positions = torch.rand(SAMPLES, 30, 2) * torch.tensor([0.0, 1.0])  # time 0
queries = torch.rand(SAMPLES, 128, 2)
rows = TensorDataset(
    positions, temperature(amplitudes, positions), queries, temperature(amplitudes, queries)
)
training = DataLoader(rows, batch_size=32, shuffle=True)

# %%
# ## The loop
#
# `prepare` moves everything to the device and wraps it. Start the script with
# `accelerate launch` to use several GPUs. For Lightning, the module above is the `LightningModule`,
# and the lines of the inner loop are its `training_step`.
config = fst.FunctionSpaceConfig(
    width=32, heads=4, fourier_bands=6, rows=(6,), anchors_per_row=8, predictor_width=32,
    predictor_blocks=1, refinement_steps=2, points_from_anchors=24, points_from_sobol=24,
)  # fmt: skip
accelerator = Accelerator(cpu=not torch.cuda.is_available())
module = AtQueries(fst.FunctionSpaceTransformer(config))
optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, EPOCHS * len(training))
module, optimizer, training, schedule = accelerator.prepare(module, optimizer, training, schedule)

losses = []
for _ in range(EPOCHS):
    for where, values, asked, targets in training:
        loss = squared_relative_l2(module(where, values, asked), targets).mean()
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
model = accelerator.unwrap_model(module).model.eval()

# %%
# ## What came out
amplitudes = torch.randn(64, 4)
start = torch.rand(64, 30, 2) * torch.tensor([0.0, 1.0])
asked = torch.rand(64, 500, 2)
device = accelerator.device
with torch.no_grad():
    seen = fst.Observations(start, temperature(amplitudes, start)).to(device)
    error = relative_l2(model(seen)(asked.to(device)).cpu(), temperature(amplitudes, asked)).mean()
print(f"{len(losses)} steps, relative L2 error on 64 new rods: {error:.3f}")

line = torch.linspace(0, 1, 100)
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 2.8), layout="constrained")
left.semilogy(losses)
left.set(xlabel="step", ylabel="squared relative error")
seen = fst.Observations(start[:1], temperature(amplitudes[:1], start[:1])).to(device)
for time in (0.0, 0.2, 1.0):
    where = torch.stack((torch.full_like(line, time), line), dim=-1)[None]
    with torch.no_grad():
        found = model(seen)(where.to(device)).cpu()
    right.plot(line, temperature(amplitudes[:1], where)[0], "0.7", linewidth=4)
    right.plot(line, found[0], label=f"time {time}")
right.set(xlabel="space", ylabel="temperature (grey: exact)")
right.legend()
plt.show()
