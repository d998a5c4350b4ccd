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
from hub_clients import language_folder
from transformers import AutoModelForCausalLM, AutoTokenizer

from tost_hf.cli import main


def test_completions_and_chat(tmp_path):
    folder = language_folder(tmp_path / "tiny")
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer("import os", return_tensors="pt").input_ids
    output = AutoModelForCausalLM.from_pretrained(folder).generate(tokens, max_new_tokens=6, do_sample=False)
    expected = tokenizer.decode(output[0, tokens.shape[1] :])

    options = ("--device", "cpu", "--host", "127.0.0.1", "--port", "0")
    command = [sys.executable, "-m", "tost_hf.cli", "serve", str(folder), *options]
    environment = os.environ | {"HF_HUB_CACHE": str(tmp_path / "cache")}  # which transformers lists, but does not create
    pipes = {"stdin": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, env=environment, text=True) as server:
        try:
            address = next(filter(None, (re.search(r"running on (http://[\d.:]+)", line) for line in server.stderr)))[1]

            def request_choice(path: str, **fields) -> dict:
                body = json.dumps({"model": str(folder), "max_tokens": 6, "temperature": 0} | fields).encode()
                request = urllib.request.Request(address + path, body, {"Content-Type": "application/json"})
                return json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]

            assert request_choice("/v1/completions", prompt="import os")["text"] == expected
            messages = [{"role": "user", "content": "import os"}]
            assert request_choice("/v1/chat/completions", messages=messages)["message"]["content"] == expected
            samples = {
                request_choice("/v1/completions", prompt="import os", temperature=None, seed=n)["text"] for n in range(5)
            }
            assert len(samples) > 1  # sampled, as no temperature is given
            models = json.load(urllib.request.urlopen(address + "/v1/models", timeout=60))["data"]
            assert [model["id"] for model in models] == [str(folder)]
        finally:
            server.terminate()


def test_missing_model_and_extra(tmp_path, monkeypatch, capsys):
    command = ["serve", str(tmp_path / "absent"), "--device", "cpu"]
    assert main(command) == 1 and "There is no model folder" in capsys.readouterr().err
    small_vision_config().save_pretrained(tmp_path / "images")
    assert main(["serve", str(tmp_path / "images")]) == 1 and "a model of images" in capsys.readouterr().err
    if not torch.cuda.is_available():
        folder = str(language_folder(tmp_path / "tiny"))
        assert main(["serve", folder, "--device", "cuda"]) == 1 and "no CUDA device" in capsys.readouterr().err
    monkeypatch.setattr("transformers.utils.import_utils.is_serve_available", lambda: False)
    monkeypatch.chdir(Path(__file__).parents[1])
    assert main(command) == 1 and 'pip install -e ".[serve]"' in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    assert main(command) == 1 and f"{Path(__file__).parents[1]}[serve]" in capsys.readouterr().err
    monkeypatch.setattr("tost_hf.extras.__file__", str(tmp_path / "site-packages/tost_hf/extras.py"))
    assert main(command) == 1 and 'pip install "tost-hf[serve]"' in capsys.readouterr().err
