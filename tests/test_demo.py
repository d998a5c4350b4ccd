"""`make demo`, with a single training step."""

import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tost_hf import ToSTForCausalLM


@pytest.mark.slow
def test_demo(tmp_path):
    script = Path(__file__).parents[1] / "examples" / "demo.py"
    command = [sys.executable, str(script), "--output_dir", str(tmp_path / "model"), "--steps", "1"]
    output = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path).stdout
    assert "Validation loss: " in output and "def read_lines(filename):" in output
    model = ToSTForCausalLM.from_pretrained(tmp_path / "model")
    assert len(AutoTokenizer.from_pretrained(tmp_path / "model")) == model.config.vocab_size == 2048
    assert (model.config.forgetting, model.config.conv_kernel) == ("token", 4)
