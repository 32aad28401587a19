"""Compiles one family of kernels for Hopper, without a GPU, and prints what each one needs.

Run as a script, in a process of its own: where Triton's interpreter is on, nothing compiles. Each
line is JSON: the kernel's name, its shared memory in bytes, and how many of its barriers are made
but not invalidated.
"""

import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from fst.kernels import (
    attention_hopper,
    feed_forward_hopper,
    projection_hopper,
    weights,
    weights_hopper,
)
from fst.kernels.gluon_parts import BOX


def described(rows, columns, dtype="bf16"):
    """The type of an argument that describes tiles of a matrix."""
    element = gl.bfloat16 if dtype == "bf16" else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], element)
    return f"tensordesc<{dtype}[{rows}, {columns}],{layout!r}>"


def absent(*names):
    """Descriptions that a kernel has no use for."""
    return dict.fromkeys(names)


def mlp_types(widths, hidden):
    tokens, packed = ("x", "y", "dy", "dx", "n"), ("w1", "w2")
    rows = feed_forward_hopper.ROWS.value
    types = dict.fromkeys(("hidden", "change", "term_tiles"), described(rows, hidden))
    for (i, letter), columns in zip(enumerate("abc"), filter(None, widths), strict=False):
        types |= {f"{name}{i}": described(rows, columns) for name in tokens}
        types |= {f"{name}{letter}": described(hidden, columns) for name in packed}
    pointers = {"x": "*bf16", "term": "*bf16", "b2": "*fp32", "sums": "*fp32"}
    return types | pointers | {"T": "i32", "P": "i32", "eps": "fp32"}


def mlp_constants(width, widths, hidden, term, tile):
    return {
        "D": width, "D1": widths[1], "H": hidden, "TERM": term,
        "TILES": weights.padded_hidden(hidden) // tile, "HID": tile,
    }  # fmt: skip


def feed_forward():
    module = feed_forward_hopper
    # Two tiles of channels and three, two groups and three, and every way to take the position
    # term, though not in every pair.
    cases = (176, 704, 0, 49152), (200, 400, 2, 49152), (176, 64, 1, 64)
    for width, hidden, term, tokens in cases:
        widths, plan = module.tiles_of(width), module.plan(tokens, width, term, 132)
        constants = mlp_constants(width, widths, hidden, term, module.HIDDEN) | {
            "D2": widths[2], "GROUPS": plan.groups, "STAGES": plan.stages,
            "REGISTERS": module.FORWARD_REGISTERS[plan.groups],
        }  # fmt: skip
        constants |= absent("x0", "x1", "x2") if term == 0 else {}
        constants |= {} if widths[2] else absent("x2", "w1c", "w2c", "y2")
        yield module.feed_forward_gluon_kernel, mlp_types(widths, module.HIDDEN), constants
    # Both widths and both forms; compiling every pair of them takes twice as long.
    for width, hidden, term in ((176, 704, False), (200, 400, True)):
        widths = weights.tile_widths(width)
        tiles = module.BACKWARD_TILES[widths[1]]
        constants = mlp_constants(width, widths, hidden, term, tiles.hidden) | {
            "STAGES": tiles.stages, "REGISTERS": module.BACKWARD_REGISTERS
        }  # fmt: skip
        constants |= absent("n0", "n1") if term else absent("x0", "x1")
        yield module.feed_forward_backward_gluon_kernel, mlp_types(widths, tiles.hidden), constants


def attention():
    module = attention_hopper
    rows, wide = module.TILE.value, module.WIDE.value
    lines = f"tensordesc<fp32[1, {rows}],{module.LINE.value!r}>"
    for size, dtype in ((24, "bf16"), (32, "fp16")):
        heads = f"tensordesc<{dtype}[1, {rows}, 1, {wide}],{BOX.value!r}>"
        types = dict.fromkeys(("queries", "keys", "values"), heads)
        types |= {"result": f"*{dtype}", "logarithms": "*fp32"}
        types |= dict.fromkeys(("H", "M", "N", "items"), "i32")
        types |= dict.fromkeys(("c", "below", "least", "most"), "fp32")
        constants = {"SIZE": size, "REAL": size - 2}
        options = {"maxnreg": module.START_REGISTERS}
        yield module.attention_gluon_kernel, types, constants, options
        types = dict.fromkeys(("queries", "grads", "keys"), heads)
        types |= dict.fromkeys(("logarithms", "deltas"), lines)
        types |= dict.fromkeys(("k", "v", "dq", "dk", "dv"), f"*{dtype}")
        types |= dict.fromkeys(("k_b", "k_h", "k_n", "v_b", "v_h", "v_n", "H", "M", "N"), "i32")
        types |= {"c": "fp32", "scale": "fp32"}
        # With the most queries that are taken.
        constants = {"SIZE": size, "STEPS": 1024 // rows, "APART": 1, "PARTS": 2}
        yield module.attention_backward_gluon_kernel, types, constants


def projection():
    module, side = projection_hopper, projection_hopper.SIDE.value
    types = dict.fromkeys(("x", "w", "y", "dy", "dx", "normed"), described(side, side))
    types |= {"tiles": "i32", "slices": "i32", "eps": "fp32"}
    # Both numbers of pieces; weights that stay in shared memory and weights that pass through it.
    for sizes in ((176, 192), (200, 256)):
        yield module.normed_linear_gluon_kernel, types, module.forward_constants(*sizes)
        yield module.normed_linear_backward_gluon_kernel, types, module.backward_constants(*sizes)


def weight_gradients():
    kernel = weights_hopper.weight_gradients_gluon_kernel
    for dtype, wide in (("bf16", 256), ("fp16", 128), ("bf16", 64)):
        depth = weights_hopper.STAGES[wide]
        constants = {"TURNED0": True, "TURNED1": False, "WIDE": wide, "DEPTH": depth}
        types = dict.fromkeys(kernel.arg_names, "i32") | dict.fromkeys(("out0", "out1"), "*fp32")
        types |= dict.fromkeys(("wide0", "wide1"), described(weights.TOKENS, wide, dtype))
        narrow = described(weights.TOKENS, weights.GROUP, dtype)
        types |= dict.fromkeys(("narrow0", "narrow1"), narrow)
        yield kernel, types, constants


def compiled(kernel, types, constants, options=None):
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(kernel, signature, values, {})
    options = {"num_warps": 4} | (options or {})
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    made = found.asm["ptx"].count("mbarrier.init")
    assert made > 0
    ended = found.asm["ptx"].count("mbarrier.inval")
    return {"kernel": kernel.fn.__name__, "shared": found.metadata.shared, "open": made - ended}


FAMILIES = {
    "attention": attention,
    "feed_forward": feed_forward,
    "projection": projection,
    "weights": weight_gradients,
}

if __name__ == "__main__":
    for case in FAMILIES[sys.argv[1]]():
        print(json.dumps(compiled(*case)))
