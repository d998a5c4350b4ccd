# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""What the Triton kernels ask of a GPU, read off their machine code: compiled ahead of time, without one.

    python examples/benchmarks/kernel_costs.py
    python examples/benchmarks/kernel_costs.py --commit 222d0d9  # the kernels of an earlier commit

For each kernel, at 12 heads of 64 channels in bfloat16, for sm_80 and sm_90: a thread's registers, its instructions, and its
bytes by wide loads and stores, for each number of w. A loop counts as often as it runs. Bytes are those asked for; what a
cache has is not read again from memory.
"""

import importlib.util
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from rows import ROOT, parse_arguments
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


class Launch(NamedTuple):
    sizes: dict[str, int]  # of blocks
    warps: int
    numbers: float  # of w, of a program's thread
    used: float  # share of the threads that have a head
    trips: Sequence[float]  # of code outside loops, in a loop and in a loop inside one, for each program


def launch(module: ModuleType, name: str, H: int, p: int) -> Launch:
    """How a kernel is launched. A loop goes over a chunk's tiles, one inside it over those before, of the same span."""
    blocks, all_heads = module._blocks(H, p), name in ALL_HEADS
    sizes = {"BLOCK_P": blocks.channels, "BLOCK_H": blocks.heads}
    if not hasattr(module, "_CHUNK"):  # before 88488fd: a chunk as one tile, and one head after another
        numbers = blocks.tokens * p * (H if all_heads else 1) / (32 * blocks.warps)
        return Launch(sizes | {"BLOCK_T": blocks.tokens}, blocks.warps, numbers, 1, (1, H))
    heads, warps = (blocks.heads, blocks.warps) if all_heads else (blocks.group, blocks.group_warps)
    chunk, span, tile = module._CHUNK, module._SPAN, module._TILE
    sizes |= {"BLOCK_T": chunk, "CHUNK": chunk, "SPAN": span, "TILE": tile, "HEADS": heads}
    warps = {"_scan_kernel": 4, "_step_kernel": blocks.warps}.get(name, warps)
    used = H / blocks.heads if all_heads else 1
    trips = (1, chunk / tile, chunk / tile * (span / tile - 1) / 2)
    return Launch(sizes, warps, chunk * heads * used * p / (32 * warps), used, trips)


def compile_ahead(name, H, p, dtype, capability, causal, absent, folder, module=tssa_triton):
    """Machine code of one kernel, compiled as the launcher would launch it, its registers and its spilled bytes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, launched = getattr(module, name), launch(module, name, H, p)
    sizes = launched.sizes | {"H": H, "P": p, "CAUSAL": causal, "REVERSE": False, "WIDTH": H * p, "WIDTH2": H}
    sizes |= {"row_stride": 1, "BLOCK": 64}  # a bias by position, as a model has it
    sizes |= {"BLOCK_N": module._SCAN_CHUNKS, "BLOCK_C": module._SCAN_CHANNELS} | dict.fromkeys(absent)
    if name == "_totals_kernel":
        sizes |= dict.fromkeys(("membership", "total_weighted_sq", "total_membership"))
    types = {"eps": "fp32", "floor": "fp32", "mask": "*u8"}
    types |= dict.fromkeys(("T", "tokens", "chunks", "bias_tokens", "bias_rows"), "i32")
    types |= dict.fromkeys(("head_stride", "position_stride", "bias_stride", "decay_stride"), "i32")
    types |= dict.fromkeys(("w", "grad", "output", "dw"), f"*{dtype}")
    types |= dict.fromkeys(("chunk_table", "sequence_table", "order", "ends"), "*i64") | {"positions": "*i32"}
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


def weigh(sass: str, trips: Sequence[float]) -> tuple[float, float]:
    """Instructions of a thread, and its bytes by loads and stores of 8 bytes and more; code in loops as often as it runs."""
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


def cost(name: str, capability: int, folder: Path, module: ModuleType = tssa_triton) -> tuple[Cost, int]:
    """What a kernel of the plain causal form costs, and its spilled bytes."""
    absent = (*PLAIN, *FORGETTING, *(["suffix_dD"] if name == "_input_grad_kernel" else []))
    sass, registers, spilled = compile_ahead(name, HEADS, CHANNELS, "bf16", capability, True, absent, folder, module)
    launched = launch(module, name, HEADS, CHANNELS)
    instructions, asked = weigh(sass, launched.trips)
    # threads past the last head run along, and ask for nothing
    return Cost(registers, instructions / launched.numbers, asked * launched.used / launched.numbers), spilled


def kernels_of(commit: str, folder: Path) -> ModuleType:
    """The kernels of an earlier commit, beside what stands around them now."""
    path = folder / "tssa_triton.py"
    source = ["git", "show", f"{commit}:src/tost_hf/model/tssa_triton.py"]
    path.write_text(subprocess.run(source, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    spec = importlib.util.spec_from_file_location(f"tost_hf.model.tssa_triton_{commit}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(argv: list[str] | None = None) -> int:
    parser = arguments(__doc__)
    parser.add_argument("--commit", default="", help="whose kernels are weighed; default: those of the working tree")
    args = parse_arguments(parser, argv, __file__)
    args.device = "cpu"
    print_header()
    report = Report(args)
    with tempfile.TemporaryDirectory() as folder:
        module = kernels_of(args.commit, Path(folder)) if args.commit else tssa_triton
        for capability in CAPABILITIES:
            for name in KERNELS:
                found, _ = cost(name, capability, Path(folder), module)
                case = {"kernel": name.strip("_"), "commit": args.commit, "H": HEADS, "p": CHANNELS}
                report.add(case | {"dtype": "bfloat16", "target": f"sm_{capability}"}, found._asdict())
    return 0


if __name__ == "__main__":
    sys.exit(main())
