# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Prefix caching: time to first token after a system prompt, chats of many turns, and the memory of 10,000 prefixes.

    python examples/benchmarks/run.py prefix_caching                       # all three, on a CPU
    python examples/benchmarks/run.py prefix_caching --cases questions --models ToST GPT-2 --system 100 2000

Random weights (they do not change the cost), models of width 768. All requests go through transformers' manager of continuous
batching: ToST's own scheduler, and for GPT-2 transformers' paged one, whose blocks of 16 tokens are shared.

questions: time to the first token of three requests with one system prompt, each with another question of 20 tokens.
chats: 32 chats at once, whose turns' prompts are all that was said before and 20 new tokens, with the cache and without,
greedy and sampled; the texts must be equal.
prefixes: short requests with 10,000 different prompts, and what the process's memory grows by.
"""

import argparse
import ctypes
import os
import random
import time
from pathlib import Path

import torch
from language_models import HYBRID, make_language_model
from registry import benchmark
from timing import Report, ratio, spread
from transformers import ContinuousBatchingConfig, GenerationConfig


VOCABULARY = 50304
MODELS = ("ToST", HYBRID, "GPT-2")
QUESTION = 20  # tokens
SYSTEM = 100  # tokens of the chats' system prompt
CHAT_SEED = 7


def build(name: str, layers: int, positions: int):
    sizes = {"width": 768, "layers": layers, "head_dim": 64}
    context = positions if name == "GPT-2" else None
    torch.manual_seed(0)
    return make_language_model(name, vocab_size=VOCABULARY, context=context, **sizes).eval()


def start_manager(model, positions: int, prefix_cache: bool = True):
    """A running manager of requests."""
    config = ContinuousBatchingConfig(max_batch_tokens=512, allow_block_sharing=prefix_cache)
    if model.config.model_type == "gpt2":
        model.set_attn_implementation("sdpa")
        config.page_size, config.num_blocks, config.max_requests_per_batch = 16, 2 * positions // 16, 32
    defaults = GenerationConfig(do_sample=False, pad_token_id=0)
    manager = model.init_continuous_batching(defaults, continuous_batching_config=config)
    manager.start()
    return manager


def random_tokens(count: int) -> list[int]:
    return [random.randrange(VOCABULARY) for _ in range(count)]


def first_token_seconds(manager, prompt: list[int]) -> tuple[float, int]:
    """Time to the first token, and how many of the prompt's were cached, where that is reported."""
    start = time.perf_counter()
    name = manager.add_request(prompt, max_new_tokens=1)
    output = manager.get_result(name, timeout=600)
    seconds = time.perf_counter() - start
    if output is None or output.error is not None or len(output.generated_tokens) != 1:
        raise RuntimeError(f"The request failed: {output}")
    return seconds, getattr(output, "num_cached_tokens", 0)


def questions(args: argparse.Namespace, report: Report) -> None:
    for system in args.system:
        positions = system + 2 * QUESTION
        for name in args.models:
            manager = start_manager(build(name, args.layers, positions), positions)
            first_token_seconds(manager, random_tokens(QUESTION))
            times, cached = ([], [], []), [0, 0, 0]
            for _ in range(args.repeats):
                prompt = random_tokens(system)
                for i, measured in enumerate(times):
                    seconds, cached[i] = first_token_seconds(manager, prompt + random_tokens(QUESTION))
                    measured.append(seconds)
            manager.stop()
            case = {"case": "questions", "model": name, "tokens": system, "sampling": "greedy", "layers": args.layers}
            metrics = {f"{n} question, s": spread(measured) for n, measured in zip(("first", "second", "third"), times)}
            metrics |= {"second / first": ratio(times[1], times[0]), "third / first": ratio(times[2], times[0])}
            if name != "GPT-2":
                metrics |= {"second, cached": cached[1], "third, cached": cached[2]}
            report.add(case, metrics)


def run_chats(model, args: argparse.Namespace, prefix_cache: bool, do_sample: bool) -> tuple[list, float, int]:
    """The answers of all chats turn by turn, the seconds and the number of cached tokens of the prompts."""
    draw = random.Random(1)
    system = [draw.randrange(VOCABULARY) for _ in range(SYSTEM)]
    texts, answers, cached = [list(system) for _ in range(args.chats)], [], 0
    manager = start_manager(model, 0, prefix_cache)
    start = time.perf_counter()
    for turn in range(args.turns):
        for i, text in enumerate(texts):
            text += [draw.randrange(VOCABULARY) for _ in range(QUESTION)]
            options = {"max_new_tokens": args.tokens, "do_sample": do_sample, "seed": CHAT_SEED + 1000 * turn + i}
            manager.add_request(text, f"{turn} {i}", **options)
        for i, text in enumerate(texts):
            output = manager.get_result(f"{turn} {i}")
            text += output.generated_tokens
            answers.append(output.generated_tokens)
            cached += output.num_cached_tokens
    seconds = time.perf_counter() - start
    manager.stop()
    return answers, seconds, cached


def chats(args: argparse.Namespace, report: Report) -> None:
    model = build("ToST", args.layers, 0)
    run_chats(model, argparse.Namespace(chats=2, turns=2, tokens=2), True, False)
    for do_sample in (False, True):
        off, seconds_off, _ = run_chats(model, args, False, do_sample)
        on, seconds_on, cached = run_chats(model, args, True, do_sample)
        tokens = args.chats * args.turns * args.tokens
        sampling = "seeded" if do_sample else "greedy"
        case = {"case": "chats", "model": "ToST", "tokens": args.turns, "sampling": sampling, "layers": args.layers}
        metrics = {"tokens/s without": tokens / seconds_off, "tokens/s with": tokens / seconds_on}
        metrics |= {"with / without": seconds_off / seconds_on, "cached tokens": cached}
        metrics |= {"equal answers": sum(x == y for x, y in zip(on, off)), "answers": len(on)}
        report.add(case, metrics)


def resident_bytes() -> int:
    """Memory of this process, without what is freed (Linux)."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def prefixes(args: argparse.Namespace, report: Report) -> None:
    model = build("ToST", args.layers, 0)
    manager = model.init_continuous_batching(GenerationConfig(do_sample=False), prefix_cache_bytes=args.prefix_cache_bytes)
    manager.start()
    cache, resident = manager.scheduler.prefix_cache, []
    for first in range(0, args.prefixes, 500):
        names = [manager.add_request([i // 200, i % 200, 1, 2], max_new_tokens=1) for i in range(first, first + 500)]
        for name in names:
            manager.get_result(name)
        manager.get_result()  # waits until nothing is computed
        resident.append(resident_bytes())
        if cache.nbytes > cache.max_bytes:
            raise RuntimeError("The prefix cache exceeds its bytes.")
    manager.stop()
    case = {"case": "prefixes", "model": "ToST", "tokens": args.prefixes, "sampling": "greedy", "layers": args.layers}
    quarter = len(resident) // 4  # by then the cache is full
    metrics = {"states": len(cache), "cache, bytes": cache.nbytes, "limit, bytes": cache.max_bytes}
    report.add(case, metrics | {"growth of memory, bytes": resident[-1] - resident[quarter]})


CASES = {"questions": questions, "chats": chats, "prefixes": prefixes}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--system", type=int, nargs="+", default=[100, 2000, 20000], help="tokens of the system prompts")
    parser.add_argument("--chats", type=int, default=32)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=16, help="tokens of each answer in a chat")
    parser.add_argument("--prefixes", type=int, default=10_000)
    parser.add_argument("--prefix-cache-bytes", type=int, default=2**26, help="of the case prefixes")


@benchmark("prefix_caching", __doc__, add_arguments, repeats=3)
def run(args: argparse.Namespace, report: Report) -> None:
    random.seed(0)
    with torch.no_grad():
        for name in args.cases:
            CASES[name](args, report)
