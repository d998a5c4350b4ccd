# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""What the Triton kernels cost: registers and spills in their machine code, compiled ahead of time, without a GPU."""

import re
import subprocess
from pathlib import Path

import pytest
from test_triton import INTERPRETED, needs_triton

from tost_hf.model import tssa_triton


# Registers a thread: the most measured below, with ptxas of Triton 3.9, and up to two steps of 8 (they come by eights)
# to spare. At 8 warps a program, 128 let two programs share a multiprocessor: the score gradient has nothing to spare. The
# forward's programs are one warp, or four for 12 heads.
REGISTERS = {
    "_totals_kernel": 80,
    "_scan_kernel": 80,
    "_membership_kernel": 96,
    "_output_kernel": 96,
    "_moment_grad_kernel": 72,
    "_score_grad_kernel": 128,
    "_input_grad_kernel": 120,
    "_step_kernel": 72,
}
REGISTERS_FORGETTING = REGISTERS | {
    "_scan_kernel": 88,
    "_totals_kernel": 80,
    "_membership_kernel": 128,
    "_output_kernel": 128,
    "_moment_grad_kernel": 80,
    "_input_grad_kernel": 160,
}


FORGETTING = ("log_decay", "total_decay", "dlog_decay")  # absent where nothing is forgotten


def compile_ahead(kernel, H, p, dtype, capability, causal, absent=()):
    """Registers and spilled bytes of one kernel, compiled as the launcher would launch it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    blocks = tssa_triton._blocks(H, p)
    sizes = {"H": H, "P": p, "CAUSAL": causal, "REVERSE": False, "WIDTH": H * p, "WIDTH2": H}
    whole = kernel.__name__ in ("_membership_kernel", "_step_kernel")
    sizes |= {"BLOCK_T": blocks.tokens, "BLOCK_H": blocks.heads, "BLOCK_P": blocks.channels, "CHUNK": blocks.tokens}
    sizes |= {"TILE": blocks.tile, "HEADS": blocks.heads if whole else blocks.group}
    sizes |= {"BLOCK_N": tssa_triton._SCAN_CHUNKS, "BLOCK_C": tssa_triton._SCAN_CHANNELS} | dict.fromkeys(absent)
    types = {"eps": "fp32", "floor": "fp32", "mask": "*u8"}
    types |= dict.fromkeys(("T", "bias_tokens", "bias_stride", "decay_stride"), "i32")
    types |= dict.fromkeys(("w", "grad", "output", "dw"), f"*{dtype}")
    types |= dict.fromkeys(("chunk_table", "sequence_table"), "*i64")
    names = [param.name for param in kernel.params]
    signature = {name: "constexpr" if name in sizes else types.get(name, "*fp32") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    source = ASTSource(kernel, signature, {name: value for name, value in sizes.items() if name in names}, aligned)
    in_turn = 8 if max(blocks.heads, blocks.channels) >= 32 else 4  # of the backward's kernels
    warps = blocks.warps if whole else blocks.group_warps if "HEADS" in names else in_turn
    warps = 4 if kernel.__name__ == "_scan_kernel" else warps
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
    cubin = Path(triton.knobs.cache.dir) / f"{kernel.__name__}.cubin"
    cubin.write_bytes(binary.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(cubin)]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK")]


@pytest.mark.slow
@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="the compiler runs in a process without TRITON_INTERPRET")
@pytest.mark.parametrize(
    "H, p, dtype, capability, causal, forgetting, absent",
    [
        (12, 64, "bf16", 80, True, False, ("mask", "chunk_table", "sequence_table")),
        (12, 64, "bf16", 90, True, False, ("mask", "chunk_table", "sequence_table")),
        (12, 64, "bf16", 80, True, True, ("mask", "chunk_table", "sequence_table")),
        (12, 64, "bf16", 90, True, True, ("mask", "chunk_table", "sequence_table")),
        (20, 64, "bf16", 90, True, False, ()),
        (20, 64, "bf16", 90, True, True, ()),
        (8, 48, "bf16", 90, False, False, ("mask", "chunk_table", "sequence_table", "bias", "initial", "final")),
    ],
)
def test_compiles_ahead_of_time_within_the_register_budget(
    H, p, dtype, capability, causal, forgetting, absent, tmp_path, monkeypatch
):
    import triton

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    absent = absent if forgetting else (*absent, *FORGETTING)
    for name, budget in (REGISTERS_FORGETTING if forgetting else REGISTERS).items():
        registers, spilled = compile_ahead(getattr(tssa_triton, name), H, p, dtype, capability, causal, absent)
        print(f"{name} {H} {p} {dtype} sm_{capability}: {registers} registers, {spilled} bytes spilled")
        assert registers <= budget, name
        assert spilled <= 16, name
