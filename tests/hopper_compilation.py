"""Compiles the MLP kernels for Hopper, without a GPU, and prints the shared memory of each.

A process of its own: in one where Triton's interpreter is on, nothing can be compiled.
"""

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from fst.kernels.feed_forward_hopper import FORWARD, REGISTERS, ROWS, feed_forward_gluon_kernel
from fst.kernels.feed_forward_hopper_backward import BACKWARD, feed_forward_backward_gluon_kernel
from fst.kernels.feed_forward_packing import HIDDEN_MULTIPLE, tile_widths


def described(rows, columns):
    """The type of an argument that describes tiles of a matrix."""
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)
    return f"tensordesc<bf16[{rows}, {columns}],{layout!r}>"


def argument_types(first, second, hidden):
    tokens, weights = ("x", "y", "dy", "dx", "n"), ("w1", "w2")
    wide = {f"{name}0": described(ROWS.value, first) for name in tokens}
    rest = {f"{name}1": described(ROWS.value, second) for name in tokens}
    wide |= {f"{name}a": described(hidden, first) for name in weights}
    rest |= {f"{name}b": described(hidden, second) for name in weights}
    staged = dict.fromkeys(("hidden", "change"), described(ROWS.value, hidden))
    pointers = {"x": "*bf16", "place": "*bf16", "b2": "*fp32", "sums": "*fp32"}
    return wide | rest | staged | pointers | {"T": "i32", "P": "i32", "eps": "fp32"}


def shared_memory(kernel, width, hidden, place, tiles):
    first, second = tile_widths(width)
    padded = -(-hidden // HIDDEN_MULTIPLE) * HIDDEN_MULTIPLE
    constants = {
        "D": width, "D1": second, "H": hidden, "PLACE": place, "TILES": padded // tiles.hidden,
        "HID": tiles.hidden, "STAGES": tiles.stages, "REGISTERS": REGISTERS,
    }  # fmt: skip
    types, names = argument_types(first, second, tiles.hidden), kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(kernel, signature, values, {})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    return compiled.metadata.shared


# Both widths and both forms; compiling every pair of them takes twice as long.
for width, hidden, place in ((176, 704, False), (200, 400, True)):
    second = tile_widths(width)[1]
    for kernel, tiles in (
        (feed_forward_gluon_kernel, FORWARD[second]),
        (feed_forward_backward_gluon_kernel, BACKWARD[second]),
    ):
        print(shared_memory(kernel, width, hidden, place, tiles))
