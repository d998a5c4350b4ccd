# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Throughput of `tost-hf serve`: tokens per second for 1, 8 and 32 concurrent clients.

    python examples/benchmarks/run.py serving    # CPU: a ToST-base-sized model, answers of 32 tokens to prompts of 16
    python examples/benchmarks/run.py serving --models "ToST conv token"  # options beyond the paper

Random weights (they do not change the cost). The server is a separate process; each client is a thread that sends a request
and waits for the whole greedy answer. The numbers of clients take turns, and a ratio is taken round by round. The time is that
from the first request to the last answer, prefill included.
"""

import argparse
import http.client
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from decode import build
from language_models import NO_STATISTICS, OPTIONS
from registry import benchmark
from timing import Report, dtype_name, ratio, spread
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


MODELS = tuple(name for name in OPTIONS if name != NO_STATISTICS)
START_SECONDS = 300


def write_folder(folder: Path, name: str, args: argparse.Namespace) -> None:
    """A model with a tokenizer whose tokens are words: w0, w1, ..."""
    model = build(name, args.layers, args.prompt + args.tokens)
    model.generation_config.eos_token_id = None  # all answers are of one length
    model.to(args.dtype).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(model.config.vocab_size)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


@contextmanager
def running_server(folder: Path, device: str):
    """The port of a server with this model."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tost_hf.cli", "serve", str(folder), "--device", device, "--port", str(port)]
    with open(folder / "log.txt", "w") as log:
        process = subprocess.Popen([*command, "--host", "127.0.0.1"], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not is_healthy(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"The server did not start: {(folder / 'log.txt').read_text()[-2000:]}")
            time.sleep(0.2)
        yield port
    finally:
        process.terminate()
        process.wait()


def is_healthy(port: int) -> bool:
    try:
        return urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).status == 200
    except OSError:
        return False


def ask(port: int, prompt: str, tokens: int) -> None:
    """One request for this many tokens.

    Raises:
        RuntimeError: the answer is an error, or has another length.
    """
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_SECONDS)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    if response.status != 200 or answer["usage"]["completion_tokens"] != tokens:
        raise RuntimeError(f"The server answered {response.status}: {str(answer)[:500]}")


def seconds_of(port: int, clients: int, args: argparse.Namespace) -> float:
    """From the first request to the last answer, all sent at once."""
    prompts = [" ".join(f"w{random.randrange(1000)}" for _ in range(args.prompt)) for _ in range(clients)]
    with ThreadPoolExecutor(clients) as pool:
        start = time.perf_counter()
        list(pool.map(lambda prompt: ask(port, prompt, args.tokens), prompts))
        return time.perf_counter() - start


def add_arguments(parser) -> None:
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["ToST"])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=16, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of each answer")


@benchmark("serving", __doc__, add_arguments, repeats=3, dtype=True)
def run(args: argparse.Namespace, report: Report) -> None:
    random.seed(0)
    for name in args.models:
        with tempfile.TemporaryDirectory() as folder:
            write_folder(Path(folder), name, args)
            rates = {clients: [] for clients in args.clients}
            with running_server(Path(folder), args.device) as port:
                ask(port, "w1", 2)  # what the first pass allocates once
                for _ in range(args.repeats):
                    for clients, measured in rates.items():
                        measured.append(clients * args.tokens / seconds_of(port, clients, args))
        fewest = min(args.clients)
        for clients, measured in rates.items():
            case = {"model": name, "clients": clients, "prompt": args.prompt, "tokens": args.tokens}
            case |= {"layers": args.layers, "dtype": dtype_name(args.dtype)}
            metrics = {"tokens/s": spread(measured), f"this / {fewest} client": ratio(measured, rates[fewest])}
            report.add(case, metrics)
