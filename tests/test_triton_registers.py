# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""What the Triton kernels cost, read off their machine code, which is compiled ahead of time, without a GPU."""

import sys
from pathlib import Path

import pytest
from test_triton import INTERPRETED, needs_triton


sys.path.append(str(Path(__file__).parents[1] / "examples" / "benchmarks"))

from kernel_costs import CAPABILITIES, DECAY, PLAIN, Cost, compile_ahead, kernel_cost


# The most that a kernel may cost at H 12, p 64, bfloat16: what was measured below with ptxas of Triton 3.9, and some to spare.
BUDGET = {
    "chunk_state_kernel": Cost(64, 5, 2.2),
    "chunk_fwd_membership_kernel": Cost(112, 25, 2.4),
    "chunk_fwd_output_kernel": Cost(88, 15, 4.4),
    "chunk_bwd_state_kernel": Cost(184, 24, 6.4),
    "chunk_bwd_score_kernel": Cost(240, 63, 8),
    "chunk_bwd_input_kernel": Cost(224, 42, 10),
}
REGISTERS = {"state_passing_kernel": 88, "step_kernel": 72}
pytestmark = [
    pytest.mark.slow,
    needs_triton,
    pytest.mark.skipif(INTERPRETED, reason="the compiler runs in a process without TRITON_INTERPRET"),
]


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_instructions_and_bytes_within_the_budget(capability, tmp_path, monkeypatch):
    import triton

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    for name, most in BUDGET.items():
        found, spilled = kernel_cost(name, capability, tmp_path)
        assert spilled <= 16, name
        assert all(x <= y for x, y in zip(found, most)), (name, found)


@pytest.mark.parametrize(
    "H, p, dtype, capability, causal, decay, absent",
    [
        (12, 64, "bf16", 80, True, True, PLAIN),
        (20, 64, "bf16", 90, True, False, ()),
        (12, 64, "fp32", 90, True, False, PLAIN),
        (8, 48, "bf16", 90, False, False, (*PLAIN, "bias", "initial", "final")),
    ],
)
def test_compiles_ahead_of_time_without_spills(H, p, dtype, capability, causal, decay, absent, tmp_path, monkeypatch):
    import triton

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    absent = absent if decay else (*absent, *DECAY)
    for name in (*BUDGET, *REGISTERS):
        _, registers, spilled = compile_ahead(name, H, p, dtype, capability, causal, absent, tmp_path)
        print(f"{name} {H} {p} {dtype} sm_{capability}: {registers} registers, {spilled} bytes spilled")
        assert registers <= REGISTERS.get(name, 255), name
        assert spilled <= 16, name
