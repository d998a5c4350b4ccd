"""The first scripts of a newcomer: `make demo`, with ten training steps, and minimal_clm.py."""

import re
import runpy
import subprocess
import sys

import pytest
from hub_clients import language_folder
from scripts import EXAMPLES
from transformers import AutoTokenizer

from tost_hf import ToSTForCausalLM
from tost_hf.model.configuration_tost import SLIDING_ATTENTION


@pytest.mark.slow
def test_demo(tmp_path):
    command = [sys.executable, str(EXAMPLES / "demo.py"), "--output_dir", str(tmp_path / "model"), "--steps", "10"]
    output = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path).stdout
    assert output.count("def read_lines(filename):") == 2
    before, after = map(float, re.search(r"\nloss +(\S+) +(\S+)\n", output).groups())
    assert after < before
    model = ToSTForCausalLM.from_pretrained(tmp_path / "model")
    assert len(AutoTokenizer.from_pretrained(tmp_path / "model")) == model.config.vocab_size == 4096
    assert (model.config.decay_type, model.config.conv_kernel) == ("token", 4)
    assert SLIDING_ATTENTION in model.config.layer_types


def test_minimal_script(tmp_path, monkeypatch, capsys):
    """It trains on most of the text, evaluates on the rest, saves what it trained, and generates."""
    model, text = language_folder(tmp_path / "model"), tmp_path / "text.txt"
    options = ["--model", str(model), "--output_dir", str(tmp_path / "out"), "--block_size", "16", "--prompt", "abcd"]
    monkeypatch.setattr(sys, "argv", ["minimal_clm.py", str(text), *options])
    text.write_text("too short")
    with pytest.raises(SystemExit, match="has fewer than 32 tokens"):
        runpy.run_path(str(EXAMPLES / "minimal_clm.py"), run_name="__main__")
    text.write_text("abcd\n" * 500)
    runpy.run_path(str(EXAMPLES / "minimal_clm.py"), run_name="__main__")
    output = capsys.readouterr().out
    before, after = map(float, re.findall(r"'eval_loss': '([\d.]+)'", output))
    assert after < before and output.rpartition("}\n")[2].startswith("abcd")
    trained = ToSTForCausalLM.from_pretrained(tmp_path / "out")
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) <= trained.config.vocab_size
