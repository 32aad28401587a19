"""Compiles the kernel for weight gradients for Hopper, without a GPU; prints its shared memory.

A process of its own: in one where Triton's interpreter is on, nothing can be compiled.
"""

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from fst.kernels.weight_gradients import GROUP, TOKENS
from fst.kernels.weight_gradients_hopper import STAGES, weight_gradients_gluon_kernel


def described(dtype, columns):
    """The type of an argument that describes tiles of a matrix."""
    element = gl.bfloat16 if dtype == "bf16" else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for([TOKENS, columns], element)
    return f"tensordesc<{dtype}[{TOKENS}, {columns}],{layout!r}>"


def shared_memory(dtype, wide):
    constants = {
        "TURNED0": True, "TURNED1": False, "WIDE": wide, "DEPTH": STAGES[wide],
    }  # fmt: skip
    types = dict.fromkeys(("wide0", "wide1"), described(dtype, wide))
    types |= dict.fromkeys(("narrow0", "narrow1"), described(dtype, GROUP))
    types |= dict.fromkeys(("out0", "out1"), "*fp32") | dict.fromkeys(constants, "constexpr")
    names = weight_gradients_gluon_kernel.arg_names
    signature = {name: types.get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(weight_gradients_gluon_kernel, signature, values, {})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    return compiled.metadata.shared


for given in (("bf16", 256), ("fp16", 128), ("bf16", 64)):
    print(shared_memory(*given))
