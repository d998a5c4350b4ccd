# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""What the Triton kernels ask of a GPU, read off their machine code: compiled ahead of time, without one.

    python examples/benchmarks/kernel_costs.py

For each kernel, at 12 heads of 64 channels in bfloat16, for sm_80 and sm_90: a thread's registers, its instructions, and its
bytes by wide loads and stores, for each number of w. A loop counts as often as it runs. Bytes are those asked for; what a
cache has is not read again from memory.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from rows import parse_arguments
from timing import Report, arguments, print_header

from tost_hf.model import tssa_triton


HEADS, CHANNELS = 12, 64
CAPABILITIES = (80, 90)
KERNELS = (
    "_totals_kernel",
    "_membership_kernel",
    "_output_kernel",
    "_moment_grad_kernel",
    "_score_grad_kernel",
    "_input_grad_kernel",
)
ALL_HEADS = ("_membership_kernel", "_score_grad_kernel")
FORGETTING = ("log_decay", "total_decay", "dlog_decay")  # absent where nothing is forgotten
PLAIN = ("mask", "chunk_table", "sequence_table", "grad_membership")


class Cost(NamedTuple):
    registers: int  # of a thread
    instructions: float  # a thread's, for each number of w
    bytes: float  # asked for by wide loads and stores (tokens, sums, totals), for each number of w, from whatever cache


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


def cost(name: str, capability: int, folder: Path) -> tuple[Cost, int]:
    """What a kernel of the plain causal form costs, and its spilled bytes."""
    absent = (*PLAIN, *FORGETTING, *(["suffix_dD"] if name == "_input_grad_kernel" else []))
    sass, registers, spilled = compile_ahead(name, HEADS, CHANNELS, "bf16", capability, True, absent, folder)
    blocks = tssa_triton._blocks(HEADS, CHANNELS)
    warps, heads = (blocks.warps, HEADS) if name in ALL_HEADS else (blocks.group_warps, blocks.group)
    instructions, asked = weigh(sass, tssa_triton._CHUNK * heads * CHANNELS / (32 * warps))
    # threads past the last head ask for nothing
    return Cost(registers, instructions, asked * (HEADS / blocks.heads if name in ALL_HEADS else 1)), spilled


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(arguments(__doc__), argv, __file__)
    args.device = "cpu"
    print_header()
    report = Report(args)
    with tempfile.TemporaryDirectory() as folder:
        for capability in CAPABILITIES:
            for name in KERNELS:
                found, _ = cost(name, capability, Path(folder))
                case = {
                    "kernel": name.strip("_"),
                    "H": HEADS,
                    "p": CHANNELS,
                    "dtype": "bfloat16",
                    "target": f"sm_{capability}",
                }
                report.add(case, found._asdict())
    return 0


if __name__ == "__main__":
    sys.exit(main())
