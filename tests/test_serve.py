"""`tost-hf serve`: transformers' own server with a ToST model."""

import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import torch
from conftest import small_vision_config
from transformers import AutoModelForCausalLM, AutoTokenizer

from tost_hf.cli import main


ROOT = Path(__file__).parents[1]


def test_completions_and_chat(tmp_path):
    """The request of the guide, sampled as the trained model's generation_config.json says, and greedy ones."""
    guide = (ROOT / "examples/guides/generation.md").read_text()
    example = json.loads(re.search("curl .*--json '(.*?)'", guide, re.DOTALL)[1])
    tokenizer = AutoTokenizer.from_pretrained(ROOT / example["model"])
    tokens = tokenizer(example["prompt"], return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(ROOT / example["model"])
    output = model.generate(tokens, max_new_tokens=example["max_tokens"], do_sample=False)
    expected = tokenizer.decode(output[0, tokens.shape[1] :])

    options = ("--device", "cpu", "--host", "127.0.0.1", "--port", "0")
    command = [sys.executable, "-m", "tost_hf.cli", "serve", *options, example["model"]]
    environment = os.environ | {"HF_HUB_CACHE": str(tmp_path / "cache")}  # which transformers 5.19 lists, but does not create
    pipes = {"stdin": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, cwd=ROOT, env=environment, text=True) as server:
        try:
            address = next(filter(None, (re.search(r"running on (http://[\d.:]+)", line) for line in server.stderr)))[1]

            def post(path: str, body: dict) -> dict:
                data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
                request = urllib.request.Request(address + path, data, headers)
                return json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]

            assert len({post("/v1/completions", example | {"seed": n})["text"] for n in range(5)}) > 1
            assert post("/v1/completions", example | {"temperature": 0})["text"] == expected
            example["messages"] = [{"role": "user", "content": example.pop("prompt")}]
            assert post("/v1/chat/completions", example | {"temperature": 0})["message"]["content"] == expected
            models = json.load(urllib.request.urlopen(address + "/v1/models", timeout=60))["data"]
            assert all(listed["id"] == example["model"] for listed in models)  # transformers 5.19 lists only the Hub's cache
        finally:
            server.terminate()


def test_missing_model_and_extra(tmp_path, monkeypatch, capsys):
    command = ["serve", "--device", "cpu", str(tmp_path / "absent")]
    assert main(command) == 1 and "There is no model folder" in capsys.readouterr().err
    small_vision_config().save_pretrained(tmp_path / "images")
    assert main(["serve", str(tmp_path / "images")]) == 1 and "a model of images" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert main(["serve", "--device", "cuda"]) == 1 and "no CUDA device" in capsys.readouterr().err
    monkeypatch.setattr("transformers.utils.import_utils.is_serve_available", lambda: False)
    monkeypatch.chdir(ROOT)
    assert main(command) == 1 and 'pip install -e ".[serve]"' in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    assert main(command) == 1 and f"{ROOT}[serve]" in capsys.readouterr().err
    monkeypatch.setattr("tost_hf.extras.__file__", str(tmp_path / "site-packages/tost_hf/extras.py"))
    assert main(command) == 1 and 'pip install "tost-hf[serve]"' in capsys.readouterr().err
