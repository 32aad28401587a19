"""What `fst.kernels.folding` makes of parameters, in plain PyTorch."""

import math

import torch
import torch.nn.functional as F  # noqa: N812

from fst.kernels.feed_forward_packing import first_extra, padded_hidden, tile_widths


def joined(tensors, heads, widened):
    """Weights or biases one after another, zeros behind the rows of each head."""
    split = torch.stack(list(tensors)).unflatten(1, (heads, -1))
    padding = (0, 0) * (split.ndim - 3) + (0, widened - split.shape[2])
    return F.pad(split, padding).flatten(0, 2)


def first_layer(gamma, beta, weight, bias):
    """[W γ, b + W β]."""
    constant = bias + (weight * beta).sum(dim=1)
    return torch.cat((weight * gamma, constant.unsqueeze(1)), dim=1)


def padded(columns, width):
    across, down = sum(tile_widths(width)) - columns.shape[1], padded_hidden(len(columns))
    return F.pad(columns, (0, across, 0, down - len(columns))).contiguous()


def two_parts(values, dtype):
    high = values.to(dtype)
    return high, (values - high.float()).to(dtype)


def pack(weight, dtype):
    return padded(weight.detach().to(dtype), weight.shape[1])


def pack_first(layer, dtype):
    """[W γ, c] with c and -u = -Σ_d w, in two parts each, behind the channels."""
    layer = layer.detach()
    weight = layer[:, :-1].to(dtype)
    width = weight.shape[1]
    c, c_rest = two_parts(layer[:, -1], dtype)
    u, u_rest = two_parts(-weight.float().sum(dim=1), dtype)
    behind = torch.stack((c, c, c_rest, u, u, u_rest), dim=1)
    gap = F.pad(weight, (0, first_extra(width) - width))
    return padded(torch.cat((gap, behind), dim=1), width)


def place_columns(weight, bias, bands, padded_bands, raw):
    """The layer on γ as the kernels divide it: for each axis its waves, then all that is left."""
    axes = weight.shape[1] // (1 + 2 * bands)
    coordinates, waves = weight[:, :axes], weight[:, axes:].unflatten(1, (2, axes, bands))
    waves = F.pad(waves, (0, padded_bands - bands)).transpose(1, 2).flatten(1)
    constant = F.pad(bias.unsqueeze(1), (axes, raw - 2 * axes - 1))
    return torch.cat((waves, coordinates, constant), dim=1)


def pack_place(layer, axes, raw, units, dtype):
    """Coordinates stand there twice, the bias in two parts."""
    behind = layer.shape[1] - raw
    waves, coordinates = layer[:, :behind], layer[:, behind : behind + axes]
    bias = layer[:, behind + 2 * axes, None]
    rest = bias - bias.to(dtype).float()
    columns = torch.cat((waves, coordinates, coordinates, bias, rest), dim=1)
    across, down = layer.shape[1] - columns.shape[1], -len(layer) % units
    return F.pad(columns, (0, across, 0, down)).to(dtype)


def place_table(frequencies, axes, columns):
    """A row of turns; one for each column of the coordinates' tile; a row of ones."""
    turns = F.pad(frequencies / (2 * math.pi), (0, columns - len(frequencies)))
    chosen = torch.eye(2 * axes, columns, device=turns.device)
    ones = F.pad(torch.ones(2, device=turns.device), (2 * axes, columns - 2 * axes - 2))
    return torch.cat((turns[None], chosen, ones[None]))
