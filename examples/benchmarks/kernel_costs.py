# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Registers, instructions and bytes of the Triton kernels, from machine code that is compiled ahead of time, without a GPU.

    python examples/benchmarks/run.py kernel_costs

For each kernel, at 12 heads of 64 channels in bfloat16, for sm_80 and sm_90: a thread's registers, its instructions, and its
bytes by wide loads and stores, per element of w. A loop counts as often as it runs. Bytes are those requested, from whatever
cache.
"""

import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from registry import benchmark
from timing import Report

from tost_hf.model import tssa_triton


HEADS, CHANNELS = 12, 64
CAPABILITIES = (80, 90)
KERNELS = (
    "chunk_state_kernel",
    "chunk_fwd_membership_kernel",
    "chunk_fwd_output_kernel",
    "chunk_bwd_state_kernel",
    "chunk_bwd_score_kernel",
    "chunk_bwd_input_kernel",
)
ALL_HEADS = ("chunk_fwd_membership_kernel", "chunk_bwd_score_kernel", "step_kernel")
DECAY = ("log_decay", "total_decay", "dlog_decay")  # absent without decay
PLAIN = ("mask", "chunk_table", "sequence_table", "grad_membership")


class Cost(NamedTuple):
    registers: int  # of a thread
    instructions: float  # a thread's, per element of w
    bytes: float  # requested by wide loads and stores (tokens, sums, totals), per element of w, from whatever cache


class Launch(NamedTuple):
    heads: int
    warps: int
    elements: float  # of w, per thread of a program
    used: float  # share of the threads that have a head
    trips: Sequence[float]  # of code outside loops, in a loop and in a loop inside one, per program


def launch(name: str, H: int, p: int) -> Launch:
    """How a kernel is launched. A loop runs over a chunk's tiles, one inside it over the earlier tiles of the same span."""
    blocks = tssa_triton._blocks(H, p, name in ALL_HEADS)
    chunk, span, tile = tssa_triton.CHUNK, tssa_triton.SPAN, tssa_triton.TILE
    warps = 4 if name == "state_passing_kernel" else blocks.warps
    used = H / blocks.heads if name in ALL_HEADS else 1
    trips = (1, chunk / tile, chunk / tile * (span / tile - 1) / 2)
    return Launch(blocks.heads, warps, chunk * blocks.heads * used * p / (32 * warps), used, trips)


def compile_ahead(name, H, p, dtype, capability, causal, absent, folder):
    """Machine code of one kernel, compiled as the launcher would launch it, its registers and its spilled bytes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, launched, blocks = getattr(tssa_triton, name), launch(name, H, p), tssa_triton._blocks(H, p, name in ALL_HEADS)
    sizes = {"H": H, "P": p, "CAUSAL": causal, "REVERSE": False, "FROM": H * p, "TO": 2 * H * p + H}
    sizes |= {"HEADS": blocks.heads, "BLOCK_P": blocks.channels}
    sizes |= {"BLOCK_N": tssa_triton.SCAN_CHUNKS, "BLOCK_C": tssa_triton.SCAN_COLUMNS} | dict.fromkeys(absent)
    if name == "chunk_state_kernel":
        sizes["membership"] = None
    types = {"mask": "*u8", "T": "i32"}
    types |= dict.fromkeys(("w", "grad", "output", "dw"), f"*{dtype}")
    types |= dict.fromkeys(("chunk_table", "sequence_table"), "*i64")
    names = [param.name for param in kernel.params]
    signature = {name: "constexpr" if name in sizes else types.get(name, "*fp32") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    source = ASTSource(kernel, signature, {name: value for name, value in sizes.items() if name in names}, aligned)
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": launched.warps})
    cubin = Path(folder) / f"{name}.cubin"
    cubin.write_bytes(binary.asm["cubin"])
    tools = triton.knobs.nvidia
    commands = [tools.cuobjdump.path, "--dump-resource-usage", str(cubin)], [tools.nvdisasm.path, "-c", str(cubin)]
    usage, sass = (subprocess.run(command, capture_output=True, text=True, check=True).stdout for command in commands)
    return sass, *(int(re.search(rf"{word}:(\d+)", usage)[1]) for word in ("REG", "STACK"))


def count_instructions(sass: str, trips: Sequence[float]) -> tuple[float, float]:
    """A thread's instructions, and its bytes by loads and stores of 8 bytes and more; code in loops as often as it runs."""
    found, labels = [], {}
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(found)
        elif text := re.match(r"\s+/\*[0-9a-f]+\*/\s+(@!?U?P\w+ )?\s*([A-Z][A-Z0-9_.]*)(.*)", line):
            found.append(text.groups())
    jumps = [(labels[re.search(r"\.L_x_\d+", rest)[0]], i) for i, (_, name, rest) in enumerate(found) if name == "BRA"]
    exits = [i for i, (when, name, _) in enumerate(found) if name == "EXIT" and not when]
    end = min(exits + [i for start, i in jumps if start == i])  # what follows is functions, and a trap that jumps to itself
    depths = [sum(start <= i <= last for start, last in jumps if start < last) for i in range(end)]
    counts = [trips[min(len(trips) - 1, depth)] for depth in depths]
    width = [re.fullmatch(r"(?:LDG|STG)\.E\.(?:\w+\.)*(64|128)(?:\.\w+)*", name) for _, name, _ in found[:end]]
    return sum(counts), sum(count * int(bits[1]) / 8 for count, bits in zip(counts, width) if bits)


def kernel_cost(name: str, capability: int, folder: Path) -> tuple[Cost, int]:
    """What a kernel of the plain causal form costs, and its spilled bytes."""
    sass, registers, spilled = compile_ahead(name, HEADS, CHANNELS, "bf16", capability, True, (*PLAIN, *DECAY), folder)
    launched = launch(name, HEADS, CHANNELS)
    instructions, requested = count_instructions(sass, launched.trips)
    # threads past the last head run along, and request nothing
    return Cost(registers, instructions / launched.elements, requested * launched.used / launched.elements), spilled


@benchmark("kernel_costs", __doc__, repeats=1)
def run(args, report: Report) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for capability in CAPABILITIES:
            for name in KERNELS:
                found, _ = kernel_cost(name, capability, Path(folder))
                case = {"kernel": name.removesuffix("_kernel"), "H": HEADS, "p": CHANNELS}
                report.add(case | {"dtype": "bfloat16", "target": f"sm_{capability}"}, found._asdict())
