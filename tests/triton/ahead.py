"""Compiles the Triton kernels for GPUs that are not here; no device is needed.

    python -m tests.triton.ahead [--all]

prints registers, bytes of stack (spills included) and of shared memory for each kernel and target.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mtserve_plugin.triton_kernels import launch
from mtserve_plugin.triton_kernels.attention import attention_kernel, join_kernel

TARGETS = (80, 90, 100)
# Bytes of shared memory that one program may use.
SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class Compiled:
    """What one program takes; stack and shared memory in bytes.

    Attributes:
        unit: what multiplies: "wgmma", "tcgen05", "mma" or "fma".
        wide_copies: asynchronous copies of 16 bytes in the code.
    """

    registers: int
    stack: int
    shared: int
    unit: str
    wide_copies: int


def compile_kernel(
    kernel: triton.JITFunction,
    target: int,
    dtype: torch.dtype,
    qk_dim: int,
    v_dim: int,
    *,
    config: int = 0,
    many: bool = False,
    split: bool = False,
    heads: int = 4,
    page_size: int = 32,
) -> Compiled:
    """As `launch` would call it for contiguous tensors: `config` counts its choices, `many` means many queries."""
    blocks = launch.choose_blocks(dtype, qk_dim, v_dim)
    chosen = blocks.configs[config]
    constants = {
        "HEADS": heads,
        "QK_DIM": qk_dim,
        "V_DIM": v_dim,
        "QK_PAD": launch._padded(qk_dim),
        "V_PAD": launch._padded(v_dim),
        "PAGE_SIZE": page_size,
        "BLOCK_M": blocks.many_queries if many else blocks.queries,
        "BLOCK_N": blocks.keys,
        "SEGMENT": launch.SEGMENT,
        "SPLIT": split,
    }
    floats = dict.fromkeys(("q", "k", "v", "table", "out"), f"*{_NAMES[dtype]}")
    types = floats | dict.fromkeys(("rows", "tiles", "pages"), "*i32")
    types |= {"parts": "*fp32", "scale": "fp32", "norm_len": "fp32"} | dict.fromkeys(constants, "constexpr")
    aligned = [*floats]
    rows = {"q": qk_dim, "k": qk_dim, "v": v_dim, "page": page_size * (qk_dim + v_dim)}
    for name, dim in rows.items():
        aligned += [f"{name}_stride"] * (heads * dim % 16 == 0) + [f"{name}_head_stride"] * (dim % 16 == 0)
    names = kernel.arg_names
    source = ASTSource(
        kernel,
        {name: types.get(name, "i32") for name in names},
        {name: value for name, value in constants.items() if name in names},
        {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in aligned},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", target, 32), options=chosen.all_kwargs())
    ptx = compiled.asm["ptx"]
    units = (("wgmma.mma", "wgmma"), ("tcgen05.mma", "tcgen05"), ("mma.sync", "mma"))
    registers, stack = _resources(compiled.asm["cubin"])
    return Compiled(
        registers,
        stack,
        compiled.metadata.shared,
        next((name for mark, name in units if mark in ptx), "fma"),
        len(re.findall(r"cp\.async\.cg\S* \[[^\]]*\], \[[^\]]*\], 0x10\b", ptx)),
    )


def _resources(cubin: bytes) -> tuple[int, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        program = triton.knobs.nvidia.cuobjdump.path
        said = subprocess.run([program, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert match, said
    return int(match.group(1)), int(match.group(2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every choice of warps and stages, not only the first")
    options = parser.parse_args()
    dims = [(torch.bfloat16, d) for d in (32, 64, 128, 256)] + [
        (torch.float16, 128),
        (torch.float32, 64),
        (torch.float32, 128),
    ]
    print(f"triton {triton.__version__}; cache {Path(triton.knobs.cache.dir)}")
    for target in TARGETS:
        for dtype, dim in dims:
            blocks = launch.choose_blocks(dtype, dim, dim)
            for many in sorted({False, blocks.many_queries != blocks.queries}):
                for index in range(len(blocks.configs) if options.all else 1):
                    size = f"{blocks.many_queries if many else blocks.queries}x{blocks.keys}"
                    config = blocks.configs[index]
                    found = compile_kernel(attention_kernel, target, dtype, dim, dim, config=index, many=many)
                    tried = f"{size} warps={config.num_warps} stages={config.num_stages} maxnreg={config.maxnreg}"
                    print(f"sm_{target} attention {_NAMES[dtype]} dim {dim} {tried} {found}", flush=True)
            print(f"sm_{target} join {_NAMES[dtype]} dim {dim} {compile_kernel(join_kernel, target, dtype, dim, dim)}")


if __name__ == "__main__":
    main()
