"""Saving, sharing, loading.

A saved model is a folder with two files. Whoever has the folder has the model: its sizes, its
weights and the statistics of its data.
"""

# %%
# ## Save
#
# `save_pretrained` writes the weights as safetensors and the configuration as JSON. Neither can
# carry code: loading a stranger's model runs nothing of theirs.
import json
import tempfile
from pathlib import Path

import torch

import fst

config = fst.FunctionSpaceConfig(
    width=32, heads=4, rows=(8,), anchors_per_row=8, points_from_anchors=16, points_from_sobol=16
)
model = fst.FunctionSpaceTransformer(config).eval()
folder = Path(tempfile.mkdtemp()) / "my-model"
model.save_pretrained(folder)
for path in sorted(folder.iterdir()):
    print(f"{path.name:20} {path.stat().st_size:>9,} bytes")

# %%
# ## What the configuration says
described = json.loads((folder / "config.json").read_text())
print(described["model"])
for name in ("low", "high", "width", "rows", "anchors_per_row", "refinement_steps"):
    print(f"{name:18} {described['config'][name]}")

# %%
# ## Load
#
# `fst.from_pretrained` knows every kind of model of this package: FST, the baselines, and the
# classifiers. The loaded model gives the same numbers.
loaded = fst.from_pretrained(folder).eval()
observations = fst.Observations(torch.rand(1, 50, 2), torch.randn(1, 50, 1))
queries = torch.rand(1, 1000, 2)
with torch.no_grad():
    same = torch.equal(model(observations)(queries), loaded(observations)(queries))
print(f"the same numbers: {same}")

# %%
# ## A damaged file is refused
#
# The weights carry a digest of themselves. One changed byte is noticed, and the error names the
# file.
weights = folder / "model.safetensors"
data = bytearray(weights.read_bytes())
data[-1] ^= 1
weights.write_bytes(bytes(data))
try:
    fst.from_pretrained(folder)
except ValueError as error:
    print(str(error).replace(str(folder), "my-model"))

# %%
# ## Where models come from
#
# | source | call |
# |---|---|
# | weights that ship with the package | `fst.from_pretrained("burgers-single")` |
# | a folder | `fst.from_pretrained("my-model")` |
# | the best weights of a run | `fst.from_pretrained("runs/mine/best")` |
# | the Hugging Face hub | `fst.from_pretrained("hf://owner/name")`, with the extra `hub` |
#
# To share a model, send the folder, or upload its two files to the hub under `owner/name`. The
# command line takes the same sources: `fst predict SOURCE --observations FILE --queries 201x1024`.
