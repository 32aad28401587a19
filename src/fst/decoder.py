"""From refined features to answers (paper, Equation 6): a value at each query, or one vector.

The blend at the queries is made by the caller, with the decoding length scales.
"""

from jaxtyping import Float
from torch import Tensor, nn

from fst import kernels
from fst.nn import MLP, FourierFeatures, PointMLP, ResidualFeedForward, fusible
from fst.prepared import Prepared


class Decoder(nn.Module):
    """MLP on [blend, γ(q), condition], a residual feed-forward, a norm, and an output MLP."""

    def __init__(self, width: int, fourier: FourierFeatures, condition: int, outputs: int) -> None:
        super().__init__()
        self.fourier = fourier
        self.evaluate = PointMLP(width, fourier.size, condition, 2 * width, width)
        self.feed_forward = ResidualFeedForward(width)
        self.norm = nn.LayerNorm(width)
        self.output = MLP(width, 2 * width, outputs)

    def forward(
        self,
        blended: Float[Tensor, "b q d"],
        queries: Float[Tensor, "b q s"],
        condition: Float[Tensor, "b c"] | None,
        prepared: Prepared | None = None,
    ) -> Float[Tensor, "b q o"]:
        place = self.evaluate.place(self.fourier, queries, condition, prepared)
        evaluated = self.evaluate(blended, place, prepared)
        return self._output(self.feed_forward(evaluated, prepared), prepared)

    def _output(
        self, tokens: Float[Tensor, "b q d"], prepared: Prepared | None
    ) -> Float[Tensor, "b q o"]:
        """MLP(LN(x)), in one kernel where there is one for it."""
        kernel, parameters = kernels.output, fusible(tokens, self.norm, self.output)
        if kernel is None or parameters is None or len(parameters[-1]) != 1:
            return self.output(self.norm(tokens))
        layers = (prepared or Prepared()).once(
            (self.norm, self.output), lambda: kernel.output_layers(*parameters, tokens.dtype)
        )
        return kernel.output_mlp(tokens, layers, self.norm.eps)


class PooledHead(nn.Module):
    """Normalise each anchor's feature, average over the anchors, and classify."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, outputs)

    def forward(self, features: Float[Tensor, "b m d"]) -> Float[Tensor, "b o"]:
        return self.output(self.norm(features).mean(dim=1))
