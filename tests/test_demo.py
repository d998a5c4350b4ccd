"""`make demo`, with three training steps."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tost_hf import ToSTForCausalLM
from tost_hf.model.configuration_tost import SLIDING_ATTENTION


@pytest.mark.slow
def test_demo(tmp_path):
    script = Path(__file__).parents[1] / "examples" / "demo.py"
    command = [sys.executable, str(script), "--output_dir", str(tmp_path / "model"), "--steps", "10"]
    output = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path).stdout
    assert output.count("def read_lines(filename):") == 2
    before, after = map(float, re.search(r"\nloss +(\S+) +(\S+)\n", output).groups())
    assert after < before
    model = ToSTForCausalLM.from_pretrained(tmp_path / "model")
    assert len(AutoTokenizer.from_pretrained(tmp_path / "model")) == model.config.vocab_size == 4096
    assert (model.config.decay_type, model.config.conv_kernel) == ("token", 4)
    assert SLIDING_ATTENTION in model.config.layer_types
