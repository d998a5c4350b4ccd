# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""What the Triton kernels cost, read off their machine code, which is compiled ahead of time, without a GPU."""

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
from test_triton import INTERPRETED, needs_triton

from tost_hf.model import tssa_triton


class Cost(NamedTuple):
    registers: int  # of a thread
    instructions: float  # a thread's, for each number of w
    bytes: float  # asked for by wide loads and stores (tokens, sums, totals), for each number of w, from whatever cache


# The most that a kernel may cost at H 12, p 64, bfloat16: what was measured below with ptxas of Triton 3.9, and some to spare.
BUDGET = {
    "_totals_kernel": Cost(64, 5, 2.2),
    "_membership_kernel": Cost(96, 27, 2.4),
    "_output_kernel": Cost(88, 15, 4.4),
    "_moment_grad_kernel": Cost(184, 24, 6.4),
    "_score_grad_kernel": Cost(240, 65, 8),
    "_input_grad_kernel": Cost(224, 42, 10),
}
REGISTERS = {"_scan_kernel": 88, "_step_kernel": 72}
FORGETTING_REGISTERS = 255
ALL_HEADS = ("_membership_kernel", "_score_grad_kernel")
FORGETTING = ("log_decay", "total_decay", "dlog_decay")  # absent where nothing is forgotten
PLAIN = ("mask", "chunk_table", "sequence_table", "grad_membership")


def compile_ahead(name, H, p, dtype, capability, causal, absent, folder):
    """Machine code of one kernel, compiled as the launcher would launch it, its registers and its spilled bytes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, blocks = getattr(tssa_triton, name), tssa_triton._blocks(H, p)
    sizes = {"H": H, "P": p, "CAUSAL": causal, "REVERSE": False, "WIDTH": H * p, "WIDTH2": H, "BLOCK_T": tssa_triton._CHUNK}
    sizes |= {"CHUNK": tssa_triton._CHUNK, "SPAN": tssa_triton._SPAN, "TILE": tssa_triton._TILE, "BLOCK_H": blocks.heads}
    sizes |= {"HEADS": blocks.heads if name in ALL_HEADS else blocks.group, "BLOCK_P": blocks.channels}
    sizes |= {"BLOCK_N": tssa_triton._SCAN_CHUNKS, "BLOCK_C": tssa_triton._SCAN_CHANNELS} | dict.fromkeys(absent)
    if name == "_totals_kernel":
        sizes |= dict.fromkeys(("membership", "total_weighted_sq", "total_membership"))
    types = {"eps": "fp32", "floor": "fp32", "mask": "*u8"}
    types |= dict.fromkeys(("T", "bias_tokens", "bias_stride", "decay_stride"), "i32")
    types |= dict.fromkeys(("w", "grad", "output", "dw"), f"*{dtype}")
    types |= dict.fromkeys(("chunk_table", "sequence_table"), "*i64")
    names = [param.name for param in kernel.params]
    signature = {name: "constexpr" if name in sizes else types.get(name, "*fp32") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    source = ASTSource(kernel, signature, {name: value for name, value in sizes.items() if name in names}, aligned)
    warps = {"_scan_kernel": 4, "_step_kernel": blocks.warps}.get(
        name, blocks.warps if name in ALL_HEADS else blocks.group_warps
    )
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
    cubin = Path(folder) / f"{name}.cubin"
    cubin.write_bytes(binary.asm["cubin"])
    tools = triton.knobs.nvidia
    commands = [tools.cuobjdump.path, "--dump-resource-usage", str(cubin)], [tools.nvdisasm.path, "-c", str(cubin)]
    usage, sass = (subprocess.run(command, capture_output=True, text=True, check=True).stdout for command in commands)
    return sass, *(int(re.search(rf"{word}:(\d+)", usage)[1]) for word in ("REG", "STACK"))


def weigh(sass: str, numbers: float) -> tuple[float, float]:
    """Instructions of a thread, and its bytes by loads and stores of 8 bytes and more, for each of `numbers` numbers of w.

    A loop goes over the chunk's tiles; one inside it over those of the span before a tile, on average.
    """
    found, labels = [], {}
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(found)
        elif text := re.match(r"\s+/\*[0-9a-f]+\*/\s+(@!?U?P\w+ )?\s*([A-Z][A-Z0-9_.]*)(.*)", line):
            found.append(text.groups())
    jumps = [(labels[re.search(r"\.L_x_\d+", rest)[0]], i) for i, (_, name, rest) in enumerate(found) if name == "BRA"]
    exits = [i for i, (when, name, _) in enumerate(found) if name == "EXIT" and not when]
    end = min(exits + [i for start, i in jumps if start == i])  # what follows is functions, and a trap that jumps to itself
    tiles = tssa_triton._CHUNK // tssa_triton._TILE
    times = [1, tiles, tiles * (tssa_triton._SPAN / tssa_triton._TILE - 1) / 2]
    counts = [times[min(2, sum(start <= i <= last for start, last in jumps if start < last))] for i in range(end)]
    width = [re.fullmatch(r"(?:LDG|STG)\.E\.(?:\w+\.)*(64|128)(?:\.\w+)*", name) for _, name, _ in found[:end]]
    asked = sum(count * int(bits[1]) / 8 for count, bits in zip(counts, width) if bits)
    return sum(counts) / numbers, asked / numbers


pytestmark = [
    pytest.mark.slow,
    needs_triton,
    pytest.mark.skipif(INTERPRETED, reason="the compiler runs in a process without TRITON_INTERPRET"),
]


@pytest.mark.parametrize("capability", [80, 90])
def test_instructions_and_bytes_within_the_budget(capability, tmp_path, monkeypatch):
    import triton

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    H, p, costs = 12, 64, {}
    blocks = tssa_triton._blocks(H, p)
    for name in BUDGET:
        absent = (*PLAIN, *FORGETTING, *(["suffix_dD"] if name == "_input_grad_kernel" else []))
        sass, registers, spilled = compile_ahead(name, H, p, "bf16", capability, True, absent, tmp_path)
        warps, heads = (blocks.warps, H) if name in ALL_HEADS else (blocks.group_warps, blocks.group)
        # threads past the last head ask for nothing
        share = H / blocks.heads if name in ALL_HEADS else 1
        instructions, asked = weigh(sass, tssa_triton._CHUNK * heads * p / (32 * warps))
        costs[name] = Cost(registers, instructions, asked * share)
        print(f"{name} sm_{capability}: {costs[name]}, {spilled} bytes spilled")
        assert spilled <= 16, name
        assert all(x <= most for x, most in zip(costs[name], BUDGET[name])), (name, costs[name])
    forward, backward = (
        sum(x.instructions for name, x in costs.items() if ("grad" in name) is back) for back in (False, True)
    )
    print(f"forward {forward:.1f}, backward {backward:.1f} instructions")


@pytest.mark.parametrize(
    "H, p, dtype, capability, causal, forgetting, absent",
    [
        (12, 64, "bf16", 80, True, True, PLAIN),
        (20, 64, "bf16", 90, True, False, ()),
        (12, 64, "fp32", 90, True, False, PLAIN),
        (8, 48, "bf16", 90, False, False, (*PLAIN, "bias", "initial", "final")),
    ],
)
def test_compiles_ahead_of_time_without_spills(H, p, dtype, capability, causal, forgetting, absent, tmp_path, monkeypatch):
    import triton

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    absent = absent if forgetting else (*absent, *FORGETTING)
    for name in (*BUDGET, *REGISTERS):
        _, registers, spilled = compile_ahead(name, H, p, dtype, capability, causal, absent, tmp_path)
        print(f"{name} {H} {p} {dtype} sm_{capability}: {registers} registers, {spilled} bytes spilled")
        assert registers <= REGISTERS.get(name, 255), name
        assert spilled <= 16, name
