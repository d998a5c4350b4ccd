"""vLLM's server with a ToST model, in processes of its own."""

import http.client
import json
import re
import time
from concurrent.futures import ThreadPoolExecutor

import engine as benchmark
import pytest
from conftest import generate_reference
from engine import SECONDS, request, running_server
from transformers import AutoTokenizer

from tost_hf import ToSTForCausalLM


TEXT = "A token is never compared with another one. " * 60


@pytest.fixture(scope="module")
def folder(folders):
    return folders / "conv_token"


@pytest.fixture(scope="module")
def port(folder, tmp_path_factory):
    options = ("--dtype", "float32", "--max-model-len", "4096", "--kv-cache-memory-bytes", str(2**27))
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING")  # of conftest.py
        log_file = tmp_path_factory.mktemp("server") / "log.txt"
        with running_server(folder, log_file, *options, "--enable-prompt-tokens-details") as port:
            yield port


def ask(port: int, path: str = "/v1/completions", **fields) -> dict:
    options = {"max_tokens": 16, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    status, text = request(port, "POST", path, {"model": "model"} | options | fields)
    assert status == 200, text
    return json.loads(text)


@pytest.fixture(scope="module")
def generated(folder):
    """The tokens that `generate` writes after a text."""
    model, tokenizer = ToSTForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    return lambda text: generate_reference(model, [tokenizer(text).input_ids], new=16)[0]


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
    status, text = request(port, "POST", "/v1/completions", {"model": "model", "prompt": "a", "max_tokens": -1})
    assert status == 400 and "max_tokens" in json.loads(text)["error"]["message"]
    status, text = request(port, "POST", "/v1/completions", {"model": "model", "prompt": "a" * 5000, "max_tokens": 10})
    assert status == 400 and "4096" in json.loads(text)["error"]["message"]


def test_a_client_that_disconnects_ends_its_request(port, generated):
    body = {"model": "model", "prompt": TEXT[:50], "max_tokens": 4000, "ignore_eos": True, "stream": True}
    before = metric(port, "vllm:generation_tokens_total")
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    assert connection.getresponse().readline().startswith(b"data: ")
    assert metric(port, "vllm:num_requests_running") == 1
    connection.close()
    while metric(port, "vllm:num_requests_running"):
        time.sleep(0.2)
    assert metric(port, "vllm:generation_tokens_total") - before < 4000
    assert ask(port, prompt=TEXT[:100])["choices"][0]["token_ids"] == generated(TEXT[:100])


def test_the_benchmark_measures_a_server(port, monkeypatch):
    monkeypatch.setattr(benchmark, "VOCABULARY", 256)
    before = metric(port, "vllm:generation_tokens_total")
    rate, first_token = benchmark.measure_round(port, clients=3, prompt=20, tokens=4)
    assert metric(port, "vllm:generation_tokens_total") - before == 12
    assert rate > 0 and 0 < first_token < 12 / rate
    assert benchmark.sequences_that_fit(port) > 1000


def metric(port: int, name: str) -> int:
    match = re.search(rf"^{name}{{.*}} ([\d.e+]+)$", request(port, "GET", "/metrics")[1], re.MULTILINE)
    assert match is not None
    return int(float(match[1]))
