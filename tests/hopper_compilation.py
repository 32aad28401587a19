"""Compiles the kernels for Hopper, without a GPU, and prints the shared memory of each.

A process of its own: in one where Triton's interpreter is on, nothing can be compiled.
"""

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from fst.kernels import attention_hopper as attention
from fst.kernels import feed_forward_hopper as forward
from fst.kernels import feed_forward_hopper_backward as backward
from fst.kernels.feed_forward_packing import HIDDEN_MULTIPLE, tile_widths
from fst.kernels.gluon_parts import BOX


def described(rows, columns):
    """The type of an argument that describes tiles of a matrix."""
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)
    return f"tensordesc<bf16[{rows}, {columns}],{layout!r}>"


def mlp_types(widths, hidden):
    tokens, weights = ("x", "y", "dy", "dx", "n"), ("w1", "w2")
    types = dict.fromkeys(("hidden", "change", "spots"), described(forward.ROWS.value, hidden))
    for (i, letter), columns in zip(enumerate("abc"), filter(None, widths), strict=False):
        types |= {f"{name}{i}": described(forward.ROWS.value, columns) for name in tokens}
        types |= {f"{name}{letter}": described(hidden, columns) for name in weights}
    pointers = {"x": "*bf16", "place": "*bf16", "b2": "*fp32", "sums": "*fp32"}
    return types | pointers | {"T": "i32", "P": "i32", "eps": "fp32"}


def mlp_constants(width, widths, hidden, place, tile):
    padded = -(-hidden // HIDDEN_MULTIPLE) * HIDDEN_MULTIPLE
    return {
        "D": width, "D1": widths[1], "H": hidden, "PLACE": place,
        "TILES": padded // tile, "HID": tile,
    }  # fmt: skip


def absent(*names):
    """Descriptions that a kernel has no use for."""
    return dict.fromkeys(names)


def attention_types(dtype):
    box, line = BOX.value, attention.LINE.value
    rows, wide = attention.TILE.value, attention.WIDE.value
    heads = f"tensordesc<{dtype}[1, {rows}, 1, {wide}],{box!r}>"
    lines = f"tensordesc<fp32[1, {rows}],{line!r}>"
    types = dict.fromkeys(("queries", "grads", "keys"), heads)
    types |= dict.fromkeys(("logarithms", "deltas"), lines)
    types |= dict.fromkeys(("k", "v", "dq", "dk", "dv"), f"*{dtype}")
    types |= dict.fromkeys(("k_b", "k_h", "k_n", "v_b", "v_h", "v_n", "H", "M", "N"), "i32")
    return types | {"c": "fp32", "scale": "fp32"}


def shared_memory(kernel, types, constants):
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(kernel, signature, values, {})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    return compiled.metadata.shared


# Two tiles of channels and three, two groups and three, and every way to take the place, though not
# in every pair.
for width, hidden, place, tokens in ((176, 704, 0, 49152), (200, 400, 2, 49152), (176, 64, 1, 64)):
    widths = forward.tiles_of(width)
    plan = forward.plan(tokens, width, place, 132)
    constants = mlp_constants(width, widths, hidden, place, forward.HIDDEN) | {
        "D2": widths[2], "GROUPS": plan.groups, "STAGES": plan.stages,
        "REGISTERS": forward.REGISTERS[plan.groups],
    }  # fmt: skip
    constants |= absent("x0", "x1", "x2") if place == 0 else {}
    constants |= {} if widths[2] else absent("x2", "w1c", "w2c", "y2")
    types = mlp_types(widths, forward.HIDDEN)
    print(shared_memory(forward.feed_forward_gluon_kernel, types, constants))
# Both widths and both forms; compiling every pair of them takes twice as long.
for width, hidden, place in ((176, 704, False), (200, 400, True)):
    widths = tile_widths(width)
    tiles = backward.BACKWARD[widths[1]]
    constants = mlp_constants(width, widths, hidden, place, tiles.hidden) | {
        "STAGES": tiles.stages, "REGISTERS": backward.REGISTERS
    }  # fmt: skip
    constants |= absent("n0", "n1") if place else absent("x0", "x1")
    types = mlp_types(widths, tiles.hidden)
    print(shared_memory(backward.feed_forward_backward_gluon_kernel, types, constants))
# With the most queries that are taken.
for size, dtype in ((24, "bf16"), (32, "fp16")):
    constants = {"SIZE": size, "STEPS": 1024 // attention.TILE.value, "APART": 1, "PARTS": 2}
    kernel = attention.attention_backward_gluon_kernel
    print(shared_memory(kernel, attention_types(dtype), constants))
