"""Fast versions of the core's modules: subclasses with the same parameters and the same function.

`fst.kernels.fuse` puts them in place. Each asks once per call whether its way applies, and leaves
the call to the plain module otherwise: in float64, on other devices, in sizes kernels do not take.

On a GPU the tokens stay in half precision from kernel to kernel, and weights are packed as the
kernels want them. Refinement steps share their weights, so these are packed once per pass and
travel with what the steps share; going backward, the gradients of all steps are added up before
they are unpacked.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (the name PyTorch users know)
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fst.field import Decoder
from fst.kernels.pruned_blend import nearest_blend, pruned_blend
from fst.layer import Context, EvaluateMixWrite, Points, Read
from fst.nn import MLP, Attention, FourierFeatures, PointMLP, ResidualFeedForward
from fst.operators import queries_at_once
from fst.rbf import Blend
from fst.types import Anchors, product_dtype
from fst.vision import DistanceAttention, DistanceRead

TRITON = find_spec("triton") is not None
if TYPE_CHECKING or TRITON:  # without Triton nothing here asks for them
    from fst.kernels import attention, blend, feed_forward, position_term, projection
    from fst.kernels.anchor_blend import AnchorBlend
    from fst.kernels.weights import EXTRA, pack_normed_layers, takes_sizes

# Matrix products and attention on a GPU want sizes that are multiples of this.
ALIGNMENT = 8
# More features or axes than this are left to PyTorch.
MOST_FEATURES, MOST_AXES = 256, 3
# A row of anchor-to-anchor weights must fit into the registers.
MOST_ANCHORS = 2048
# Longer heads are well served by PyTorch's own attention.
LONGEST_HEAD = 32
# Entries of a matrix are counted in 32 bits.
MOST_NUMBERS = 2**31
# Fewer points or anchors than this gain nothing from lists of anchors.
MANY_POINTS, MANY_ANCHORS = 4096, 128
# Queries whose anchors are looked for together: their tiles times all anchors are held at once.
REGION, GPU_REGION = 2**15, 2**18
# Bytes held at once where the blend needs no memory of its own, and how many times the width that
# is for each query, by the size of a number: in half precision most hidden layers are on the chip.
FUSED_BYTES, FUSED_WIDTHS = 2**30, {2: 8, 4: 12}
# Numbers that the hidden layers of a query hold, as a multiple of the width.
HIDDEN_WIDTHS = 12
# Of PyTorch's own on an H200, cuDNN's attention is the fastest for short heads.
PREFERRED = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def on_gpu(tensor: Tensor) -> bool:
    """On one of NVIDIA's, with Triton: some kernels contain its instructions."""
    return TRITON and tensor.is_cuda and torch.version.hip is None


def takes_tokens(tokens: Tensor, hidden: int) -> bool:
    """Whether the fused layers take tokens (b p d): on a GPU, products in half precision, sizes in
    multiples of 8. Float32 tokens will do under autocast, as for any product."""
    if not on_gpu(tokens) or tokens.ndim != 3 or tokens.element_size() > 4:
        return False
    batch, count, width = tokens.shape
    return (
        product_dtype(tokens).itemsize == 2
        and takes_sizes(width, hidden)
        and 0 < batch * count * max(width + EXTRA, hidden) < MOST_NUMBERS
    )


def takes_anchors(anchors: Tensor, width: int) -> bool:
    """Whether the fused blend takes anchors (b m s) with so many features each: on a GPU, in
    float32 or less, of moderate size."""
    return (
        on_gpu(anchors)
        and anchors.element_size() <= 4
        and anchors.shape[2] <= MOST_AXES
        and width <= MOST_FEATURES
    )


def without_gradients() -> bool:
    """Whether nothing is recorded for a backward pass, and numbers may decide what is done."""
    return not torch.is_grad_enabled() and not torch.compiler.is_compiling()


def alone_on_cpu(tensor: Tensor) -> bool:
    """The same, on a CPU."""
    return tensor.device.type == "cpu" and without_gradients()


class PackedWeights:
    """Parameters as products and kernels want them, packed when first asked for."""

    def __init__(self) -> None:
        self._packed: dict[tuple[nn.Module | None, ...], Any] = {}

    def of(self, layers: tuple[nn.Module | None, ...], pack: Callable[[], Any]) -> Any:
        if layers not in self._packed:
            self._packed[layers] = pack()
        return self._packed[layers]


# Projections and attention


def joint_layer(
    projections: Sequence[nn.Linear], heads: int, size: int
) -> tuple[Float[Tensor, "n d"], Float[Tensor, " n"]]:
    """Several projections as one, their heads widened with zeros to this size."""
    weight = torch.stack([each.weight for each in projections]).unflatten(1, (heads, -1))
    bias = torch.stack([each.bias for each in projections]).unflatten(1, (heads, -1))  # t h k
    padding = size - bias.shape[-1]
    weight, bias = F.pad(weight, (0, 0, 0, padding)), F.pad(bias, (0, padding))
    return weight.flatten(0, -2), bias.flatten()


def project(
    tokens: Float[Tensor, "b n d"],
    norm: nn.LayerNorm | None,
    projections: Sequence[nn.Linear],
    heads: int,
    size: int,
    packed: PackedWeights,
) -> Float[Tensor, "b n t h k"]:
    """Tokens, normalised, through several projections in one product, with widened heads."""
    key, count = (norm, *projections), len(projections)
    fused = tokens.element_size() == 2 and takes_tokens(tokens, count * heads * size)
    if norm is None or not fused:
        weight, bias = packed.of(key, lambda: joint_layer(projections, heads, size))
        joint = F.linear(tokens if norm is None else norm(tokens), weight, bias)
    else:
        weights, biases = zip(*((each.weight, each.bias) for each in projections), strict=True)
        given = norm.weight, norm.bias, weights, biases, tokens.dtype
        slot, layer, _ = packed.of(
            key, lambda: pack_normed_layers(*given, heads=heads, widened=size)
        )
        joint = projection.normed_linear(tokens, slot, layer, norm.eps)
    separate: Tensor = joint.unflatten(-1, (count, heads, size))
    return separate


def attend(
    output: nn.Linear,
    queries: Float[Tensor, "b h p k"] | None,
    keys_values: Float[Tensor, "b n t h k"],
    mask: Bool[Tensor, "b n"] | None,
    packed: PackedWeights,
) -> Float[Tensor, "b p d"]:
    """Softmax attention and the projection behind it. Without `queries` those come first in
    `keys_values`.

    The projection's weights leave out the channels that heads were widened by. Our own kernel makes
    the first of them one: its weight is the bias, whose gradient then comes with the weight's,
    without a sum over all tokens of its own.
    """
    heads, size = keys_values.shape[-2:]
    head_size = output.in_features // heads
    scale = head_size**-0.5
    short = keys_values.element_size() == 2 and size <= LONGEST_HEAD
    ours = mask is None and short and on_gpu(keys_values)
    if ours:
        mixed: Tensor = attention.short_attention(keys_values, queries, scale, head_size)
    else:
        *first, keys, values = keys_values.permute(2, 0, 3, 1, 4).unbind(0)
        asked = first[0] if queries is None else queries
        keep = None if mask is None else mask[:, None, None, :]
        with sdpa_kernel(PREFERRED, set_priority=True):
            mixed = F.scaled_dot_product_attention(asked, keys, values, attn_mask=keep, scale=scale)
    ones = ours and head_size < size and output.bias is not None

    def widened() -> Tensor:
        weight = output.weight.unflatten(1, (heads, -1))  # d h k
        if ones:
            bias = F.pad(output.bias[:, None, None], (0, 0, 0, heads - 1))  # of the first head
            weight = torch.cat((weight, bias), dim=-1)
        return F.pad(weight, (0, size - weight.shape[-1])).flatten(1)

    weight = packed.of((output,), widened)
    return F.linear(mixed.transpose(1, 2).flatten(-2), weight, None if ones else output.bias)


def aligned(size: int) -> int:
    return size + -size % ALIGNMENT


class FusedObserved(NamedTuple):
    """Keys and values that `project` has made, the packed weights, and for images the anchors'
    extra channels."""

    keys_values: Float[Tensor, "b n 2 h k"]
    packed: PackedWeights
    channels: Float[Tensor, "b m e"] | None = None


def attend_normed(
    layer: Attention,
    tokens: Float[Tensor, "b p d"],
    norm: nn.LayerNorm | None,
    observed: FusedObserved,
    mask: Bool[Tensor, "b n"] | None,
) -> Float[Tensor, "b p d"]:
    """attention(LN(x)), with extra channels of the queries where there are some."""
    keys_values, packed, channels = observed
    size = keys_values.shape[-1]
    # Not `[:, :, 0]`, whose gradient would be a copy.
    queries = project(tokens, norm, (layer.query,), layer.heads, size, packed).squeeze(2)
    if channels is not None:
        padding = (layer.head_size, size - layer.head_size - channels.shape[-1])
        queries = queries + F.pad(channels, padding).unsqueeze(2)
    return attend(layer.output, queries.transpose(1, 2), keys_values, mask, packed)


class FusedAttention(Attention):
    """Projections of the same tokens as one product, with heads of a size that attention likes.

    Keys and values stay in one tensor: that tells them from the plain module's.
    """

    def _applies(self, tokens: Tensor) -> bool:
        return on_gpu(tokens) and product_dtype(tokens).itemsize == 2

    def _project(self, tokens: Tensor, *projections: nn.Linear) -> Float[Tensor, "b n t h k"]:
        size = aligned(self.head_size)
        return project(tokens, None, projections, self.heads, size, PackedWeights())

    def keys_values(self, context: Float[Tensor, "b n d"]) -> Any:
        if not self._applies(context):
            return super().keys_values(context)
        return self._project(context, self.key, self.value)

    def forward(
        self,
        tokens: Float[Tensor, "b p d"],
        keys_values: Any,
        mask: Bool[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b p d"]:
        if not isinstance(keys_values, Tensor):
            return super().forward(tokens, keys_values, mask)
        return attend_normed(self, tokens, None, FusedObserved(keys_values, PackedWeights()), mask)

    def attend_to_self(self, tokens: Float[Tensor, "b p d"]) -> Float[Tensor, "b p d"]:
        if not self._applies(tokens):
            return super().attend_to_self(tokens)
        keys_values = self._project(tokens, self.query, self.key, self.value)
        return attend(self.output, None, keys_values, None, PackedWeights())


# MLPs


class AlignedLinear(nn.Linear):
    """For inputs of any size, such as an embedding of 131 numbers: on a GPU zeros fill them up, or
    the product would take a slow path."""

    def forward(self, inputs: Float[Tensor, "... i"]) -> Float[Tensor, "... o"]:
        if not on_gpu(inputs):
            return super().forward(inputs)
        padding = (0, aligned(self.in_features) - self.in_features)
        return F.linear(F.pad(inputs, padding), F.pad(self.weight, padding), self.bias)


def takes_onednn(tokens: Float[Tensor, "b p d"], layers: Sequence[nn.Module]) -> bool:
    """Whether oneDNN takes these layers, of a kind that nobody replaced or changed: in float32."""
    return (
        torch.backends.mkldnn.is_available()
        and product_dtype(tokens) == tokens.dtype == torch.float32
        and all(
            layer.approximate == "none"
            if isinstance(layer, nn.GELU)
            else type(layer) in (nn.Linear, AlignedLinear) and layer.weight.dtype == torch.float32
            for layer in layers
        )
    )


def onednn_mlp(
    inputs: Float[Tensor, "b p i"], layers: Sequence[nn.Module]
) -> Float[Tensor, "b p o"]:
    """Linear, GELU, linear by what PyTorch's compiler calls on a CPU: the bias needs no copy, GELU
    no memory, and on processors that are not Intel's the products are faster."""
    first, second = (each for each in layers if isinstance(each, nn.Linear))
    linear = torch.ops.mkldnn._linear_pointwise.default
    hidden = linear(inputs, first.weight, first.bias, "gelu", [], "none")
    mapped: Tensor = linear(hidden, second.weight, second.bias, "none", [], "")
    return mapped


def normed_parameters(
    tokens: Float[Tensor, "b p d"], norm: nn.LayerNorm, layers: MLP
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor] | None:
    """The parameters of MLP(LN(x)) for a kernel, if tokens and layers are what kernels are for.

    Layers that somebody replaced go the plain way, and so do tokens in float32, even under
    autocast: a kernel would round their sum.
    """
    first, between, second = layers
    if not isinstance(first, nn.Linear) or not isinstance(second, nn.Linear):
        return None
    if not isinstance(between, nn.GELU) or between.approximate != "none":
        return None
    if tokens.element_size() != 2 or not takes_tokens(tokens, first.out_features):
        return None
    parameters = norm.weight, norm.bias, first.weight, first.bias, second.weight, second.bias
    return None if any(each is None for each in parameters) else parameters


def residual_feed(
    tokens: Float[Tensor, "b p d"], norm: nn.LayerNorm, layers: MLP, packed: PackedWeights
) -> Float[Tensor, "b p d"]:
    """x + MLP(LN(x)), in one kernel where there is one for it."""
    parameters = normed_parameters(tokens, norm, layers)
    if parameters is None:
        tokens = tokens + layers(norm(tokens))
        return tokens
    packed_layers = packed.of(
        (norm, layers), lambda: feed_forward.normed_layers(*parameters, tokens)
    )
    return feed_forward.feed_forward(tokens, packed_layers, norm.eps)


class FusedResidualFeedForward(ResidualFeedForward):
    """x + FFN(LN(x)) in one kernel."""

    def forward(self, tokens: Float[Tensor, "b p d"]) -> Float[Tensor, "b p d"]:
        return residual_feed(tokens, self.norm, self.feed_forward, PackedWeights())


def term_at(
    layer: PointMLP,
    fourier: FourierFeatures,
    positions: Float[Tensor, "#b p s"],
    condition: Float[Tensor, "b c"] | None,
    packed: PackedWeights,
) -> Float[Tensor, "#b p k"]:
    """The position term of F_θ's first layer: what depends on where, not on what is stored there.

    The layer is linear, so W[blend, γ, c] = W_blend blend + (W_γ γ + W_c c + bias), and the
    bracket is the same in every refinement step.
    """
    _, weight, given = layer.first.weight.split(layer.sizes, dim=1)
    bias = layer.first.bias
    share = None if condition is None else F.linear(condition, given)
    known = type(fourier) is FourierFeatures and positions.element_size() <= 4
    if known and position_term.takes(positions.shape[-1], fourier.bands, len(weight)):

        def pack() -> Any:
            dtype = product_dtype(positions)
            return position_term.position_layer(weight, bias, fourier.frequencies(positions), dtype)

        return position_term.position_term(positions, packed.of((layer, fourier), pack), share)
    term = F.linear(fourier(positions), weight, bias)
    return term if share is None else term + share.unsqueeze(1)


def point_mlp(
    layer: PointMLP,
    values: Float[Tensor, "b p d"],
    term: Float[Tensor, "#b p k"],
    packed: PackedWeights,
) -> Float[Tensor, "b p o"]:
    """F_θ of the blend, its position term given."""
    weight, second = layer.first.weight[:, : layer.sizes[0]], layer.second
    packed_layers = packed.of(
        (layer,), lambda: feed_forward.point_layers(weight, second.weight, second.bias, values)
    )
    return feed_forward.point_mlp(values, term, packed_layers)


# The blend


class FusedBlend(Blend):
    """Equation 1 without weights in memory: fused on a GPU, pruned on a CPU.

    Anchors are left out where all of them together weigh less than the rounding of the features.
    """

    def forward(
        self,
        points: Float[Tensor, "#b q s"],
        anchors: Float[Tensor, "b m s"],
        length_scales: Float[Tensor, "b m s"],
        features: Float[Tensor, "b m d"],
        neighbors: int | None = None,
    ) -> Float[Tensor, "b q d"]:
        given = points, anchors, length_scales, features
        many = points.shape[1] >= MANY_POINTS and anchors.shape[1] >= MANY_ANCHORS
        alone = without_gradients()
        if neighbors is not None and neighbors < anchors.shape[1]:
            if torch.compiler.is_compiling():
                return super().forward(*given, neighbors)
            return nearest_blend(points.expand(len(anchors), -1, -1), *given[1:], neighbors)
        if takes_anchors(anchors, features.shape[2]):
            given = points, anchors, length_scales, features.to(product_dtype(features))
            if many and alone and anchors.shape[1] <= blend.MOST_ANCHORS:
                return blend.pruned_blend(*given)
            return blend.fused_blend(*given)
        if many and alone and anchors.device.type == "cpu" and len(points) == len(anchors):
            return pruned_blend(*given)
        return super().forward(*given)


# One refinement step


class FusedRead(Read):
    """Equation 2: norms in one kernel with the projections, x + FFN(LN(x)) in one."""

    def precompute(self, tokens: Float[Tensor, "b n d"], anchors: Anchors) -> Any:
        layer, packed = self.attention, PackedWeights()
        size = aligned(layer.head_size)
        if not takes_tokens(tokens, 2 * layer.heads * size):
            return super().precompute(tokens, anchors)
        pair = layer.key, layer.value
        return FusedObserved(project(tokens, self.norm_h, pair, layer.heads, size, packed), packed)

    def forward(self, z: Float[Tensor, "b m d"], context: Context) -> Float[Tensor, "b m d"]:
        if not isinstance(context.observed, FusedObserved):
            return super().forward(z, context)
        z = z + attend_normed(self.attention, z, self.norm_a, context.observed, context.mask)
        return residual_feed(z, self.norm_2, self.feed_forward, context.observed.packed)


class _RowsAndTokens(torch.autograd.Function):
    """Rows x[:, i], and x for whatever else uses it.

    Where x is used twice, PyTorch adds up two whole gradients, one of which is zero but for the
    rows. Here the uses are in a chain: the rows' gradients are added to what comes back.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(tokens: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        return tokens[:, indices], tokens.view_as(tokens)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Any) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, of_rows: Tensor, of_tokens: Tensor) -> tuple[Tensor, None]:
        (indices,) = ctx.saved_tensors
        # Not `index_add`, which PyTorch's compiler leaves as it is in half precision.
        return torch.ops.aten.index_put(of_tokens, [None, indices], of_rows, True), None


def rows_and_tokens(
    tokens: Float[Tensor, "b p d"], indices: Int[Tensor, " r"]
) -> tuple[Float[Tensor, "b r d"], Float[Tensor, "b p d"]]:
    """Tokens with these indices, which may repeat, and all of them."""
    rows, same = _RowsAndTokens.apply(tokens, indices)  # type: ignore[no-untyped-call]
    return rows, same


class FusedAtAnchors(NamedTuple):
    """W^A z as a function of z, the position term at the anchors, and the packed weights."""

    blend: Callable[[Tensor], Tensor]
    term: Float[Tensor, "b m k"]
    packed: PackedWeights


class FusedEvaluateMixWrite(EvaluateMixWrite):
    """Equations 3-5: the position's share of F_θ once per input, norms inside the kernels."""

    def precompute(self, anchors: Anchors, condition: Float[Tensor, "b c"] | None) -> Any:
        """W^A is stored even where the fused blend could make it anew: it serves every step, and
        reading it costs less than computing it again. Of very many anchors it would fill the
        memory, and the fused blend serves."""
        positions, scales = anchors.positions, anchors.refinement_length_scales
        width, hidden = self.evaluate.second.out_features, self.evaluate.second.in_features
        dtype = product_dtype(positions)
        if not (
            takes_anchors(positions, width) and dtype.itemsize == 2 and takes_sizes(width, hidden)
        ):
            return super().precompute(anchors, condition)
        packed = PackedWeights()
        at_anchors: Callable[[Tensor], Tensor] = partial(self.blend, positions, positions, scales)
        if positions.shape[1] <= MOST_ANCHORS:
            at_anchors = AnchorBlend(positions, scales, dtype)
        term = term_at(self.evaluate, self.fourier, positions, condition, packed)
        return FusedAtAnchors(at_anchors, term, packed)

    def forward(
        self, z: Float[Tensor, "b m d"], context: Context, points: Points
    ) -> Float[Tensor, "b m d"]:
        if not isinstance(context.at_anchors, FusedAtAnchors):
            return super().forward(z, context, points)
        blend_at_anchors, term, packed = context.at_anchors
        anchors, evaluate = context.anchors, self.evaluate
        at_anchors = point_mlp(evaluate, blend_at_anchors(z), term, packed)  # b m d

        e, at_anchors = rows_and_tokens(at_anchors, points.anchor_indices)
        if len(points.uniform):
            uniform = points.uniform.unsqueeze(0)  # 1 u s
            term = term_at(evaluate, self.fourier, uniform, context.condition, packed)
            scales = anchors.refinement_length_scales
            blended = self.blend(uniform, anchors.positions, scales, z)
            e = torch.cat((e, point_mlp(evaluate, blended, term, packed)), dim=1)  # b e d

        mix, write, size = self.mix, self.write, aligned(self.mix.head_size)
        all_three = mix.query, mix.key, mix.value
        keys_values = project(e, self.norm_e, all_three, mix.heads, size, packed)
        e = e + attend(mix.output, None, keys_values, None, packed)
        e = residual_feed(e, self.norm_g, self.mix_feed, packed)

        pair = write.key, write.value
        keys_values = project(e, self.norm_e, pair, write.heads, size, packed)
        z = z + attend_normed(
            write, at_anchors, self.norm_q, FusedObserved(keys_values, packed), None
        )
        return residual_feed(z, self.norm_v, self.write_feed, packed)


# Decoding


class FusedDecoder(Decoder):
    """Equation 6 with fused MLPs; queries in any order are decoded neighbours together."""

    def forward(
        self,
        queries: Float[Tensor, "b q s"],
        anchors: Anchors,
        features: Float[Tensor, "b m d"],
        condition: Float[Tensor, "b c"] | None,
        neighbors: int | None = None,
    ) -> Float[Tensor, "b q o"]:
        whole = neighbors is None or neighbors >= features.shape[1]
        taken = takes_anchors(queries, features.shape[2])
        if whole and taken and _sortable(queries):
            # Neighbours share the anchors that matter to them.
            order = blend.compact_order(queries)[..., None]
            queries = queries.gather(1, order.expand_as(queries))
            values = super().forward(queries, anchors, features, condition)
            return torch.empty_like(values).scatter_(1, order.expand_as(values), values)
        many = queries.shape[1] >= MANY_POINTS and features.shape[1] >= MANY_ANCHORS
        known = type(self.blend) is FusedBlend and len(queries) > 0
        if many and known and not taken and alone_on_cpu(queries):
            # The MLP of neighbours follows their blend, which is still in the cache.
            given = queries, anchors.positions, anchors.length_scales, features
            conditions = [None] * len(queries) if condition is None else condition.split(1)
            then = [partial(self.pointwise, condition=each) for each in conditions]
            if neighbors is None or whole:
                return pruned_blend(*given, then)
            return nearest_blend(*given, neighbors, then)
        return super().forward(queries, anchors, features, condition, neighbors)

    def pointwise(
        self,
        blended: Float[Tensor, "b q d"],
        queries: Float[Tensor, "b q s"],
        condition: Float[Tensor, "b c"] | None,
    ) -> Float[Tensor, "b q o"]:
        if alone_on_cpu(queries):
            return self._in_chunks(blended, queries, condition)
        if not takes_tokens(blended, self.evaluate.second.in_features):
            return super().pointwise(blended, queries, condition)
        packed = PackedWeights()
        term = term_at(self.evaluate, self.fourier, queries, condition, packed)
        tokens = point_mlp(self.evaluate, blended, term, packed)
        tokens = self.feed_forward(tokens)
        parameters = normed_parameters(tokens, self.norm, self.output)
        if parameters is None or len(parameters[-1]) != 1:
            plain: Tensor = self.output(self.norm(tokens))
            return plain
        return feed_forward.output_mlp(tokens, *parameters, self.norm.eps)

    def _in_chunks(
        self,
        blended: Float[Tensor, "b q d"],
        queries: Float[Tensor, "b q s"],
        condition: Float[Tensor, "b c"] | None,
    ) -> Float[Tensor, "b q o"]:
        """Hidden layers of a few queries at a time stay in a CPU's cache."""
        batch, _, width = blended.shape
        size = queries_at_once(queries, batch * HIDDEN_WIDTHS * width)
        pairs = zip(blended.split(size, dim=1), queries.split(size, dim=1), strict=True)
        layers = (
            self.evaluate.first,
            self.evaluate.second,
            *self.feed_forward.feed_forward,
            *self.output,
        )
        way = self._with_onednn if takes_onednn(blended, layers) else super().pointwise
        parts = [way(*pair, condition) for pair in pairs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _with_onednn(
        self,
        blended: Float[Tensor, "b q d"],
        queries: Float[Tensor, "b q s"],
        condition: Float[Tensor, "b c"] | None,
    ) -> Float[Tensor, "b q o"]:
        """The plain module's equation, each GELU in one pass with its product."""
        inputs = [blended, self.fourier(queries)]
        if condition is not None:
            inputs.append(condition.unsqueeze(1).expand(-1, queries.shape[1], -1))
        tokens = onednn_mlp(torch.cat(inputs, dim=-1), (self.evaluate.first, self.evaluate.second))
        feed = self.feed_forward
        tokens = tokens + onednn_mlp(feed.norm(tokens), list(feed.feed_forward))
        return onednn_mlp(self.norm(tokens), list(self.output))

    def queries_at_once(
        self,
        queries: Float[Tensor, "b q s"],
        features: Float[Tensor, "b m d"],
        neighbors: int | None,
    ) -> int:
        batch, _, width = features.shape
        if alone_on_cpu(queries):
            return REGION  # neighbours among many share their lists of anchors
        if not takes_anchors(queries, width):
            return super().queries_at_once(queries, features, neighbors)
        if neighbors is not None and neighbors < features.shape[1]:
            return max(REGION, GPU_REGION // batch)
        size = product_dtype(features).itemsize
        held = queries.shape[1] * batch * width * size * FUSED_WIDTHS[size]
        return max(1, math.ceil(queries.shape[1] / max(1, math.ceil(held / FUSED_BYTES))))


def _sortable(queries: Float[Tensor, "b q s"]) -> bool:
    """Whether queries are many and in no order; a graph being captured cannot ask."""
    return (
        without_gradients()
        and not (queries.is_cuda and torch.cuda.is_current_stream_capturing())
        and queries.shape[1] >= MANY_POINTS
        and blend.scattered(queries)
    )


# Images


EXTRA_CHANNELS = 7  # two parts of both axes and of the patch's own term, and the anchor's own
MOST_PATCHES = 256  # on an axis: beyond, odd numbers are no longer exact in bfloat16


def two_parts(exact: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`exact` as a number with bfloat16's eight digits and the rest, both in `dtype`.

    In bfloat16 the sum keeps sixteen binary digits, in wider dtypes all. The gradient flows
    through the first alone: attention multiplies both by the same factor, so once is enough.
    """
    fixed = exact.detach()
    rest = fixed - fixed.to(torch.bfloat16).to(fixed.dtype)
    return (exact - rest).to(dtype), rest.to(dtype)


class FusedDistanceRead(FusedRead, DistanceRead):
    """The bias towards near patches as a few more channels of each head, without a tensor of it.

    The square in the bias is a dot product,

        -|a - c|²/(2 σ²) = [a/σ², 1, -|a|²/(2 σ²)] · [c, -|c|²/(2 σ²), 1],

    with coordinates that count from the middle of the image. So that bfloat16 loses nothing, patch
    centres become odd whole numbers, which it holds exactly, and the rest the sum of two parts. The
    last channel changes no weight and needs one part; it is there for the backward: rounded
    gradients of an anchor's logits do not quite sum to zero, and with it the error counts from the
    anchor and not from the middle of the image.
    """

    def precompute(self, tokens: Float[Tensor, "b n d"], anchors: Anchors) -> Any:
        layer, grid = self.attention, self.attention.bias.grid
        size = aligned(layer.head_size + EXTRA_CHANNELS)
        if (
            not takes_tokens(tokens, 2 * layer.heads * size)
            or max(grid.rows, grid.columns) > MOST_PATCHES
        ):
            return DistanceRead.precompute(self, tokens, anchors)
        return patch_keys_values(layer, tokens, self.norm_h, anchors.positions, PackedWeights())


def patch_keys_values(
    layer: DistanceAttention,
    tokens: Float[Tensor, "b n d"],
    norm: nn.LayerNorm | None,
    positions: Float[Tensor, "b m 2"],
    packed: PackedWeights,
) -> FusedObserved:
    """What all refinement steps share: patches and anchors stay where they are."""
    size = aligned(layer.head_size + EXTRA_CHANNELS)
    keys_values = project(tokens, norm, (layer.key, layer.value), layer.heads, size, packed)
    # The values have zeros where the keys have the extra channels.
    extra = F.pad(key_channels(layer, keys_values.dtype), (layer.head_size, 0))
    extra = F.pad(extra, (0, size - extra.shape[-1]))
    extra = torch.stack((extra, torch.zeros_like(extra)), dim=1).unsqueeze(2)  # n 2 1 k
    channels = query_channels(layer, positions, keys_values.dtype)
    return FusedObserved(keys_values + extra, packed, channels)


def _counts(layer: DistanceAttention) -> Float[Tensor, " 2"]:
    """Patches along each axis; filled in place, because a copy from the host cannot be captured."""
    like, grid = layer.bias.log_sigma, layer.bias.grid
    return torch.stack([like.new_full((), float(n)) for n in (grid.rows, grid.columns)])


def query_channels(
    layer: DistanceAttention, positions: Float[Tensor, "b m 2"], dtype: torch.dtype
) -> Float[Tensor, "b m e"]:
    """[both parts of a/σ² per half patch, 1, 1, -|a|²/(2 σ²)], times what attention divides by."""
    sharpness = math.sqrt(layer.head_size) / layer.bias.sigma().square()
    centred = positions - 0.5
    scaled = centred * (sharpness * 0.5 / _counts(layer))
    ones = torch.ones_like(scaled, dtype=dtype)
    own = (-0.5 * sharpness * centred.square().sum(dim=-1, keepdim=True)).to(dtype)
    return torch.cat((*two_parts(scaled, dtype), ones, own), dim=-1)


def key_channels(layer: DistanceAttention, dtype: torch.dtype) -> Float[Tensor, "n e"]:
    """[c in half patches, twice, then both parts of -|c|²/(2 σ²), 1], for the same product."""
    bias = layer.bias
    centres = bias.grid.centres(bias.log_sigma) - 0.5  # n 2
    half_patches = (2 * _counts(layer) * centres).round().to(dtype)
    squares = centres.square().sum(dim=-1, keepdim=True)
    own = -0.5 * math.sqrt(layer.head_size) * squares / bias.sigma().square()
    ones = torch.ones_like(own, dtype=dtype)
    return torch.cat((half_patches, half_patches, *two_parts(own, dtype), ones), dim=-1)
