"""Compiles the projection's kernels for Hopper, without a GPU; prints each one's shared memory.

A process of its own: in one where Triton's interpreter is on, nothing can be compiled.
"""

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from fst.kernels import projection_hopper as hopper
from fst.kernels import projection_hopper_backward as backward

SIDE = hopper.SIDE.value
LAYOUT = gl.NVMMASharedLayout.get_default_for([SIDE, SIDE], gl.bfloat16)
TYPES = dict.fromkeys(
    ("x", "w", "y", "dy", "dx", "normed"),
    f"tensordesc<bf16[{SIDE}, {SIDE}],{LAYOUT!r}>",
) | {"tiles": "i32", "slices": "i32", "eps": "fp32"}


def shared_memory(kernel, constants):
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else TYPES[name] for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(kernel, signature, values, {})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    return compiled.metadata.shared


# Both numbers of pieces; weights that stay in shared memory and weights that pass through it.
for width, outputs in ((176, 192), (200, 256)):
    constants = hopper.forward_constants(width, outputs)
    print(shared_memory(hopper.normed_linear_gluon_kernel, constants))
    constants = backward.backward_constants(width, outputs)
    print(shared_memory(backward.normed_linear_backward_gluon_kernel, constants))
