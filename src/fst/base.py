"""What every model of this package shares, whatever it predicts.

A model is built from one configuration, saves and loads itself, names the parameters that take a
learning rate of their own, and says which random evaluation points it consumes. Operators and
classifiers add what goes in and what comes out.
"""

from abc import ABC
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import nn

from fst import pretrained
from fst.evaluation_points import ResampledPoints

# Classes that have become choices of another's configuration.
FORMER_NAMES = {"ObserveFirst": "FunctionSpaceTransformer"}


class Model(nn.Module, ABC):
    """A network that is built from one configuration and can be trained, saved and loaded."""

    config_type: ClassVar[type]
    config: Any

    def point_stream(self, anchor_seed: int, sobol_seed: int) -> ResampledPoints | None:
        """The random evaluation points this model consumes, if it consumes any."""
        return None

    def param_groups(self) -> dict[str, list[nn.Parameter]]:
        """Parameters by the learning rate they take: `main`, and `predictor` where there is one."""
        predictor = self.predicting()
        known = {id(parameter) for parameter in predictor}
        main = [parameter for parameter in self.parameters() if id(parameter) not in known]
        return {"main": main, "predictor": predictor} if predictor else {"main": main}

    def predicting(self) -> list[nn.Parameter]:
        """The parameters that the paper trains at a rate of their own, if there are any."""
        return []

    def no_weight_decay(self) -> list[nn.Parameter]:
        """Parameters that weight decay leaves alone, because zero is no natural value of theirs."""
        return []

    def fit_statistics(
        self, training: Any, standardization: tuple[float, float] | None = None
    ) -> None:
        """Take from training data what standardises inputs and outputs; some models take nothing.

        `standardization` gives the mean and standard deviation of all values instead.
        """

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `model.safetensors` and `config.json`, the statistics included."""
        pretrained.save(type(self).__name__, self.config, self.state_dict(), Path(folder))

    @classmethod
    def from_pretrained(cls, source: str | Path) -> Self:
        """The model saved in a local folder, shipped under a name, or on the Hugging Face hub.

        A model on the hub is named hf://owner/name; `fst.pretrained.shipped` knows the names. The
        model is in `eval()` mode.

        Called on `Model` it loads any model; called on a class, only that class and its kin.
        """
        folder = pretrained.find(source)
        name, config, weights = pretrained.read(folder)
        # Classes without a configuration are there to be inherited from.
        known = {kind.__name__: kind for kind in _family(cls) if hasattr(kind, "config_type")}
        name = FORMER_NAMES.get(name, name)
        if name not in known:
            raise pretrained.PretrainedError(
                f"{folder}: holds a {name!r}, expected one of {', '.join(sorted(known))}"
            )
        kind = known[name]
        pretrained.check_sizes(config, str(folder))
        described: Any = pretrained.from_json(config, kind.config_type, str(folder))
        build: Any = kind  # every model is constructed from its configuration alone
        try:
            with torch.device("meta"):  # shapes alone: nothing is allocated for a wrong size
                expected = {name: t.shape for name, t in build(described).state_dict().items()}
            pretrained.check_shapes(weights, expected, str(folder))
            model: Self = build(described)
        except (RuntimeError, MemoryError, ImportError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise pretrained.PretrainedError(f"{folder}: cannot be built: {reason}") from error
        if any(tensor.dtype == torch.float64 for tensor in weights.values()):
            model.double()
        model.load_state_dict(weights)
        return model.eval()


def build_model(config: Any) -> Model:
    """The untrained model a configuration describes, on the CPU in float32."""
    for kind in _family(Model):
        if getattr(kind, "config_type", None) is type(config):
            build: Callable[[Any], Model] = kind
            return build(config)
    raise TypeError(f"config must describe a model, got {type(config).__name__}")


def _family(cls: type[Model]) -> list[type[Model]]:
    """A class and all its descendants that have been imported."""
    return [cls, *(kind for child in cls.__subclasses__() for kind in _family(child))]


def parameter_count(module: nn.Module) -> int:
    """Trainable numbers; a complex weight counts as two."""
    return sum(p.numel() * (2 if p.is_complex() else 1) for p in module.parameters())
