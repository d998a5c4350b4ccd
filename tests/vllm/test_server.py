"""vLLM's server with a ToST model, in processes of its own."""

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import expected
from transformers import AutoTokenizer

from tost_hf import ToSTForCausalLM


TEXT = "A token is never compared with another one. " * 60
START_SECONDS = 120


@pytest.fixture(scope="module")
def folder(folders):
    return folders / "conv_token"


@pytest.fixture(scope="module")
def port(folder, tmp_path_factory):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--served-model-name", "tost", "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", "4096", "--kv-cache-memory-bytes", str(2**27), "--enable-prompt-tokens-details"]
    path = tmp_path_factory.mktemp("server") / "log.txt"
    environment = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    with open(path, "w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not is_healthy(port):
            assert process.poll() is None and time.monotonic() < deadline, path.read_text()[-3000:]
            time.sleep(0.5)
        yield port
    finally:
        process.terminate()
        process.wait(timeout=60)


def is_healthy(port: int) -> bool:
    with contextlib.suppress(OSError):
        return request(port, "/health", method="GET")[0] == 200
    return False


def request(port: int, path: str, body: dict | None = None, method: str = "POST") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_SECONDS)
    connection.request(method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    status, text = response.status, response.read().decode()
    connection.close()
    return status, text


def ask(port: int, path: str = "/v1/completions", **fields) -> dict:
    options = {"max_tokens": 16, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    status, text = request(port, path, {"model": "tost"} | options | fields)
    assert status == 200, text
    return json.loads(text)


@pytest.fixture(scope="module")
def generated(folder):
    """The tokens that `generate` writes after a text."""
    model, tokenizer = ToSTForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    return lambda text: expected(model, [tokenizer(text).input_ids], new=16)[0]


def test_completions_and_chat(port, generated):
    assert ask(port, prompt=TEXT[:100])["choices"][0]["token_ids"] == generated(TEXT[:100])
    answer = ask(port, "/v1/chat/completions", messages=[{"role": "user", "content": TEXT[:80]}])
    assert answer["choices"][0]["token_ids"] == generated(TEXT[:80])


def test_32_clients_at_once(port, generated):
    prompts = [TEXT[i : 2 * i + 20] for i in range(32)]
    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda prompt: ask(port, prompt=prompt)["choices"][0]["token_ids"], prompts))
    assert answers == [generated(prompt) for prompt in prompts]


def test_a_second_equal_prompt_is_cached(port):
    first, second = (ask(port, prompt="Once. " + TEXT[:1494]) for _ in range(2))
    assert first["usage"]["prompt_tokens"] == 1500
    assert not first["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 1000
    assert second["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]


def test_a_bad_request_gets_a_message(port):
    status, text = request(port, "/v1/completions", {"model": "tost", "prompt": "a", "max_tokens": -1})
    assert status == 400 and "max_tokens" in json.loads(text)["error"]["message"]
    status, text = request(port, "/v1/completions", {"model": "tost", "prompt": "a" * 5000, "max_tokens": 10})
    assert status == 400 and "4096" in json.loads(text)["error"]["message"]


def test_a_client_that_vanishes_ends_its_request(port, generated):
    body = {"model": "tost", "prompt": TEXT[:50], "max_tokens": 4000, "ignore_eos": True, "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_SECONDS)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    assert connection.getresponse().readline().startswith(b"data: ")
    assert running_requests(port) == 1
    connection.close()
    deadline = time.monotonic() + 20
    while running_requests(port) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert running_requests(port) == 0
    assert ask(port, prompt=TEXT[:100])["choices"][0]["token_ids"] == generated(TEXT[:100])


def running_requests(port: int) -> int:
    lines = request(port, "/metrics", method="GET")[1].splitlines()
    return int(float(next(line.split()[-1] for line in lines if line.startswith("vllm:num_requests_running{"))))
