"""The Function-Space Transformer: a neural operator with adaptive anchors."""

from fst.config import FunctionSpaceConfig
from fst.field import Field
from fst.model import FunctionSpaceTransformer
from fst.operators import Operator, parameter_count
from fst.rbf import rbf_blend
from fst.types import Anchors, Domain, Observations

from_pretrained = Operator.from_pretrained

__version__ = "0.1.0"

__all__ = [
    "Anchors",
    "Domain",
    "Field",
    "FunctionSpaceConfig",
    "FunctionSpaceTransformer",
    "Observations",
    "from_pretrained",
    "parameter_count",
    "rbf_blend",
]
