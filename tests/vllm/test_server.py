"""vLLM's server with a ToST model, in separate processes."""

import http.client
import json
import re
import time
from concurrent.futures import ThreadPoolExecutor

import engine as benchmark
import pytest
from conftest import generate_reference
from engine import TIMEOUT_SECONDS, request, start_server
from transformers import AutoTokenizer

from tost_hf import ToSTForCausalLM


DOCUMENT = "A token is never compared with another one. " * 60


@pytest.fixture(scope="module")
def folder(folders):
    return folders / "conv_token"


@pytest.fixture(scope="module")
def port(folder, tmp_path_factory):
    options = ("--dtype", "float32", "--kv-cache-memory-bytes", str(2**27))
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING")  # which conftest.py sets
        log_file = tmp_path_factory.mktemp("server") / "log.txt"
        with start_server(folder, log_file, *options, "--enable-prompt-tokens-details") as port:
            yield port


def request_completion(port: int, path: str = "/v1/completions", **fields) -> dict:
    options = {"max_tokens": 16, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    status, body = request(port, "POST", path, {"model": "model"} | options | fields)
    assert status == 200, body
    return json.loads(body)


@pytest.fixture(scope="module")
def generate(folder):
    """Returns the tokens that `generate` generates after a prompt."""
    model, tokenizer = ToSTForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    return lambda prompt: generate_reference(model, [tokenizer(prompt).input_ids], max_new_tokens=16)[0]


def test_completions_and_chat(port, generate):
    assert request_completion(port, prompt=DOCUMENT[:100])["choices"][0]["token_ids"] == generate(DOCUMENT[:100])
    response = request_completion(port, "/v1/chat/completions", messages=[{"role": "user", "content": DOCUMENT[:80]}])
    assert response["choices"][0]["token_ids"] == generate(DOCUMENT[:80])


def test_32_concurrent_clients(port, generate):
    prompts = [DOCUMENT[i : 2 * i + 20] for i in range(32)]
    with ThreadPoolExecutor(32) as pool:
        outputs = list(pool.map(lambda prompt: request_completion(port, prompt=prompt)["choices"][0]["token_ids"], prompts))
    assert outputs == [generate(prompt) for prompt in prompts]


def test_repeated_prompt_is_cached(port):
    first, second = (request_completion(port, prompt="Once. " + DOCUMENT[:1494]) for _ in range(2))
    assert first["usage"]["prompt_tokens"] == 1500
    assert not first["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 1000
    assert second["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]


def test_bad_requests(port):
    status, body = request(port, "POST", "/v1/completions", {"model": "model", "prompt": "a", "max_tokens": -1})
    assert status == 400 and "max_tokens" in json.loads(body)["error"]["message"]
    status, body = request(port, "POST", "/v1/completions", {"model": "model", "prompt": "a" * 5000, "max_tokens": 10})
    assert status == 400 and "4096" in json.loads(body)["error"]["message"]


def test_disconnect_aborts_the_request(port, generate):
    body = {"model": "model", "prompt": DOCUMENT[:50], "max_tokens": 4000, "ignore_eos": True, "stream": True}
    tokens_before = read_metric(port, "vllm:generation_tokens_total")
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_SECONDS)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    assert connection.getresponse().readline().startswith(b"data: ")
    assert read_metric(port, "vllm:num_requests_running") == 1
    connection.close()
    while read_metric(port, "vllm:num_requests_running"):
        time.sleep(0.2)
    assert read_metric(port, "vllm:generation_tokens_total") - tokens_before < 4000
    assert request_completion(port, prompt=DOCUMENT[:100])["choices"][0]["token_ids"] == generate(DOCUMENT[:100])


def test_benchmark_of_a_server(port, monkeypatch):
    monkeypatch.setattr(benchmark, "VOCAB_SIZE", 256)
    tokens_before = read_metric(port, "vllm:generation_tokens_total")
    rate, first_token = benchmark.measure_round(port, clients=3, prompt=20, tokens=4)
    assert read_metric(port, "vllm:generation_tokens_total") - tokens_before == 12
    assert rate > 0 and 0 < first_token < 12 / rate
    assert benchmark.max_concurrency(port) > 1000


def read_metric(port: int, name: str) -> int:
    match = re.search(rf"^{name}{{.*}} ([\d.e+]+)$", request(port, "GET", "/metrics")[1], re.MULTILINE)
    assert match is not None
    return int(float(match[1]))
