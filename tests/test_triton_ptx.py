# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The Triton kernels' compiled PTX, run on the CPU by an emulator, against the float64 operator.

The emulator is no part of the project: PTX_EMULATOR names its folder. Four cases run, and all 64 with PTX_CASES=all.
"""

import itertools
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import test_triton
import torch
from test_triton import INTERPRETED, ON_GPU, check, make, needs_triton, packed, padding_mask

from tost_hf.model import tssa_triton


FOLDER = Path(os.environ.get("PTX_EMULATOR", Path(__file__).resolve().parents[2] / "shared" / "tools" / "ptx"))
SHAPES = [(12, 64, 70), (16, 64, 9), (20, 64, 5), (8, 48, 33), (4, 48, 66), (3, 16, 130), (1, 40, 64), (5, 7, 65)]
VARIANTS = [  # form, dtype, what is special
    ("causal", torch.float32, "mask"),
    ("causal", torch.bfloat16, "state"),
    ("causal", torch.float32, "packed"),
    ("causal", torch.float16, "positions"),
    ("bidirectional", torch.float32, "packed"),
    ("bidirectional", torch.bfloat16, "mask"),
    ("decay", torch.float32, "mask"),
    ("decay", torch.bfloat16, "packed"),
]
CASES = [(*shape, *variant) for shape, variant in itertools.product(SHAPES, VARIANTS)]
if os.environ.get("PTX_CASES") != "all":
    CASES = CASES[::21]

pytestmark = [
    pytest.mark.slow,
    needs_triton,
    pytest.mark.skipif(INTERPRETED or ON_GPU, reason="the kernels run as they are compiled for a GPU, but without one"),
    pytest.mark.skipif(not (FOLDER / "emukernel.py").exists(), reason="PTX_EMULATOR names no folder with an emulator"),
]


def store_matrices(self, parts, arguments, counts):
    """The emulator's stmatrix, for all warps at once: where several warps have the same numbers, each writes them: no race."""
    assert "trans" not in parts
    registers = arguments[1].strip("{} ").replace(" ", "").split(",")
    rows = self.addr(arguments[0])
    self.track(rows, 16, self.tid % 32 < 8 * len(registers), True, "stmatrix")
    for i, name in enumerate(registers):
        places = rows.reshape(-1, 32)[:, 8 * i : 8 * i + 8, None] + np.arange(16)
        values = self.val(name, "b32").view(np.uint8).reshape(places.shape)
        self.sh[places], self.sh_ok[places] = values, True
        assert (self.sh[places] == values).all(), "two warps write different numbers to one place"


@pytest.fixture
def emulated(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import emu
    import emukernel

    monkeypatch.setattr(emu, "FAST", True)  # counts nothing that is not looked at
    monkeypatch.setattr(emu.CTA, "stmatrix", store_matrices)
    for name in [name for name in dir(tssa_triton) if name.endswith("_kernel")]:
        monkeypatch.setattr(tssa_triton, name, emukernel.Emu(getattr(tssa_triton, name)))
    emukernel.STATS.clear()
    yield emukernel.STATS
    for name in ("emu", "emukernel"):
        sys.modules.pop(name)


@pytest.mark.parametrize("H, p, T, form, dtype, special", CASES, ids=str)
def test_compiled_kernels(H, p, T, form, dtype, special, emulated):
    causal = form != "bidirectional"
    decay = (1e-5, 5.0) if form == "decay" else None
    leaves = make(2, T, H, p, dtype, causal, state=special == "state", decay=decay)
    mask = padding_mask(T) if special == "mask" else None
    seq_idx = packed([(T // 3, T - T // 3), (T - 1, 1)]) if special == "packed" else None
    positions = None
    if special == "positions":
        leaves["bias"], positions = torch.randn(T + 3, H, requires_grad=True), torch.arange(2, T + 2).expand(2, T)
    check(leaves, mask, seq_idx, causal, positions)
    ran = {name for name, counts in emulated.items() if counts["ctas"]}
    assert {
        "chunk_fwd_membership_kernel",
        "chunk_fwd_output_kernel",
        "chunk_bwd_score_kernel",
        "chunk_bwd_input_kernel",
    } <= ran
    assert not any(counts["uninit shared read"] + counts["undefined register"] for counts in emulated.values())


def test_nan_and_inf_stay_in_their_packed_sequence(emulated):
    test_triton.TestKernels.test_nan_and_inf_stay_in_their_packed_sequence(None, "decay")
