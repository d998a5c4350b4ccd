"""`tost-hf serve`: transformers' server with a local and a published model, and its clients: OpenAI's, `transformers chat`."""

import io
import json
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager

import pytest
from hub_clients import Clients, language_folder, save_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from tost_hf.cli import main


openai = pytest.importorskip("openai", reason="the packages of the [serve] extra are not installed")
pytestmark = pytest.mark.slow

import serving_clients  # noqa: E402  needs the extra's packages
from serving_clients import COMPLETIONS, Served, asking, serving  # noqa: E402  need the extra's packages

from tost_hf.serving.server import ServedModels, patch_server  # noqa: E402


folder = serving_clients.folder  # fixture


@contextmanager
def running_server(*arguments, log, environment=None):
    """`tost-hf serve` with these arguments, in another process: its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tost_hf.cli", "serve", *arguments, "--host", "127.0.0.1", "--port", str(port)]
    with open(log, "w") as output:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    address = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 180
    try:
        while True:
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5)
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.2)
        yield address
    finally:
        process.terminate()
        process.wait(timeout=60)


@pytest.fixture(scope="module")
def server(hub, folder, tmp_path_factory):
    """The address of a running server, which finds tost/served on the Hub."""
    with Clients(hub, tmp_path_factory.mktemp("clients")) as clients:
        clients.command("publish", folder, "tost/served", token=hub.token("writer")).check()
    home = tmp_path_factory.mktemp("home")
    with running_server("--device", "cpu", log=home / "log.txt", environment=hub.environment(home)) as address:
        yield address


@pytest.fixture(scope="module")
def expected(folder):
    """What greedy generation writes after "import os"."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer("import os", return_tensors="pt").input_ids
    written = AutoModelForCausalLM.from_pretrained(folder).generate(tokens, max_new_tokens=6, do_sample=False)
    return tokenizer.decode(written[0, tokens.shape[1] :])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["local", "published"])
def test_openai_endpoint(server, folder, expected, kind, stream):
    client = openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0, timeout=120)
    options = {"model": str(folder) if kind == "local" else "tost/served", "max_tokens": 6, "temperature": 0, "stream": stream}
    answer = client.completions.create(prompt="import os", **options)
    chat = client.chat.completions.create(messages=[{"role": "user", "content": "import os"}], **options)
    if stream:
        text = "".join(part.choices[0].text or "" for part in answer if part.choices)
        said = "".join(part.choices[0].delta.content or "" for part in chat if part.choices)
    else:
        text, said = answer.choices[0].text, chat.choices[0].message.content
    assert text == said == expected


def test_transformers_chat(server, folder, hub, tmp_path):
    """The client of transformers, as at a terminal."""
    command = [sys.executable, "-m", "transformers.cli.transformers", "chat", str(folder), server, "max_new_tokens=6"]
    environment = hub.environment(tmp_path) | {"COLUMNS": "200"}
    done = subprocess.run(
        command, input="import os\nn\n!exit\n", env=environment, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 tokens in" in done.stdout


def test_model_without_chat_template_is_named(folder, tmp_path, capsys):
    """Its chat endpoint cannot work; the user hears that before the server starts, not as an error."""
    bare = language_folder(tmp_path / "bare")
    with patch_server():
        assert ServedModels(force_model=str(bare), device="cpu").loaded_models
        assert "has no chat template" in capsys.readouterr().err
        assert ServedModels(force_model=str(folder), device="cpu").loaded_models
    assert "template" not in capsys.readouterr().err


def test_quantized_model_is_served(folder):
    pytest.importorskip("bitsandbytes")
    with patch_server():
        models = ServedModels(force_model=str(folder), device="cpu", quantization="bnb-8bit")
    (loaded,) = models.loaded_models.values()
    assert loaded.model.is_loaded_in_8bit
    models.shutdown()


EVIL = """
from pathlib import Path
from transformers import GPT2Config, GPT2LMHeadModel
Path({marker!r}).touch()
class EvilConfig(GPT2Config):
    model_type = "evil"
class EvilForCausalLM(GPT2LMHeadModel):
    config_class = EvilConfig
"""


@pytest.fixture
def evil(tmp_path):
    """A folder with a model that is remote code, which leaves a mark when it runs: the folder and the mark."""
    folder, marker = tmp_path / "evil", tmp_path / "ran"
    config = GPT2Config(vocab_size=320, n_embd=16, n_layer=1, n_head=2, n_positions=64)
    GPT2LMHeadModel(config).save_pretrained(folder)
    save_tokenizer(folder)
    (folder / "evil.py").write_text(EVIL.format(marker=str(marker)))
    written = json.loads((folder / "config.json").read_text())
    auto_map = {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilForCausalLM"}
    written |= {"model_type": "evil", "architectures": ["EvilForCausalLM"], "auto_map": auto_map}
    (folder / "config.json").write_text(json.dumps(written))
    return folder, marker


def test_code_of_a_repository_runs_only_with_the_flag(evil, monkeypatch, capsys):
    folder, marker = evil
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 20))
    assert main(["serve", "--device", "cpu", str(folder)]) == 1 and not marker.exists()
    shown = capsys.readouterr()
    assert "trust_remote_code" in shown.err and "Traceback" not in shown.err and "[y/N]" not in shown.out
    with serving(force_model=str(folder), trust_remote_code=True) as (_, port):
        answer = Served(port, folder, None, None).ask(COMPLETIONS, asking(COMPLETIONS, "import os", max_tokens=3))
    assert answer.usage[1] == 3 and marker.exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["./nope"], "There is no folder './nope'."),
        (["--trust-remote-code"], "--trust-remote-code needs a MODEL"),
        (["--cb-max-batch-tokens", "-5"], "max_batch_tokens must be at least 1"),
        (["--log-level", "shout"], "unknown value 'shout'"),
        (["--dtype", "float3"], "Unsupported dtype: 'float3'"),
    ],
)
def test_wrong_command_line(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr("uvicorn.Server.run", lambda server: pytest.fail("The server started."))
    assert main(["serve", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_folder_that_cannot_be_served(tmp_path, capsys):
    folder = language_folder(tmp_path / "broken")
    (folder / "model.safetensors").write_bytes(b"x" * 99)
    assert main(["serve", str(folder), "--device", "cpu"]) == 1
    assert "damaged" in capsys.readouterr().err
