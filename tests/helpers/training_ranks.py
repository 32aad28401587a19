"""One of several training processes, started by torchrun: `training_ranks.py FOLDER`.

With the name of a signal behind the folder the second process sends that to itself on the way.
"""

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import PartialState

from fst.training import Interrupted, TrainingError, run_folder
from fst.training.loop import build_accelerator, end_processes
from fst.training.settings import Loss
from fst.training.trainer import Trainer
from training_fakes import (
    MUON_RANKS_SETTINGS,
    RANKS_SETTINGS,
    TinyConfig,
    TinyModel,
    WaveSamples,
    tiny_train,
)
from training_images import IMAGE_RANKS_SETTINGS, image_train, streamed_train


def interrupted_on_one_process(path: Path) -> None:
    """A signal that reaches one process alone stops all of them at the same step."""
    update = Trainer.update

    def signalled(trainer: Trainer) -> None:
        if trainer.state.step == 9 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        update(trainer)

    Trainer.update = signalled  # type: ignore[method-assign]
    try:
        tiny_train(path, RANKS_SETTINGS)
    except Interrupted as interruption:
        print(f"rank {os.environ['RANK']} stopped after step {interruption.step}: {interruption}")
    Trainer.update = update  # type: ignore[method-assign]


def equal_weights() -> bool:
    """Whether all processes have the same weights, to the last bit, after some steps of Muon."""
    settings = MUON_RANKS_SETTINGS
    samples = WaveSamples.draw(13, seed=1)
    accelerator = build_accelerator(settings, torch.device("cpu"))
    trainer = Trainer(TinyModel(TinyConfig()), samples, samples, settings, accelerator)
    # What is compiled is not divided by a wrapper's hooks.
    assert type(trainer.loss) is Loss
    for _ in range(4):
        trainer.update()
    weights = torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])
    one, other = accelerator.gather(weights[None])
    return torch.equal(one, other)


def refused_by_a_lock(path: Path) -> None:
    """A folder in which another process is at work: all learn of it, and none waits for ever."""
    run_folder.PATIENCE = 0.5
    try:
        tiny_train(path, RANKS_SETTINGS)
    except TrainingError as error:
        print(f"rank {os.environ['RANK']} refused: {error}")


def left_alone(path: Path, number: signal.Signals) -> None:
    """The second process is killed or frozen after six steps; the first does not wait for ever."""
    PartialState(cpu=True, timeout=timedelta(seconds=6))
    update = Trainer.update

    def signalled(trainer: Trainer) -> None:
        if trainer.state.step == 6 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), number)
        update(trainer)

    Trainer.update = signalled  # type: ignore[method-assign]
    try:
        tiny_train(path, RANKS_SETTINGS)
    except TrainingError as error:
        print(error, flush=True)
        os._exit(1)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    if len(sys.argv) > 2:
        left_alone(folder, signal.Signals[sys.argv[2]])
        sys.exit("nothing happened")
    tiny_train(folder / "two", RANKS_SETTINGS)
    refused_by_a_lock(folder / "busy")
    interrupted_on_one_process(folder / "interrupted")
    tiny_train(folder / "interrupted", RANKS_SETTINGS, resume=True)
    tiny_train(folder / "two-muon", MUON_RANKS_SETTINGS)
    print(f"rank {os.environ['RANK']} has the same weights: {equal_weights()}")
    image_train(folder / "two-images", IMAGE_RANKS_SETTINGS)
    streamed_train(folder / "two-streamed", IMAGE_RANKS_SETTINGS)
    end_processes(0)
    sys.exit("not ended")
