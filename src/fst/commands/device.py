"""The one meaning of `--device`, for all commands."""

import torch
from accelerate import PartialState


def parse_device(name: str | None) -> torch.device:
    """cpu or cuda, as asked for; a GPU where there is one if nothing is asked for.

    Several processes, kernels and CUDA graphs all take the current GPU, so a number is refused:
    the one to use is chosen for the whole process.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        kind, _, number = name.partition(":")
        chosen = kind == "cuda" and number.isdecimal()
        hint = f"; CUDA_VISIBLE_DEVICES={number} before the command chooses that GPU"
        raise ValueError(f"device must be cpu or cuda, got {name!r}{hint if chosen else ''}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device must be cpu here, got 'cuda': PyTorch sees no GPU")
    return torch.device(name)


def choose_device(name: str | None) -> torch.device:
    """The device of this process, which may be one of several that train together.

    To be called first: Accelerate settles on a device when it is first asked for anything.
    """
    device: torch.device = PartialState(cpu=parse_device(name).type == "cpu").device
    return device
