# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Decoding latency of ToST and of transformers' GPT-2: of ToST-base's width and depth, or small.

    python examples/benchmarks/run.py decode                                     # CPU: positions 10, 100 and 1,000
    python examples/benchmarks/run.py decode --size small --batch 1 8 32
    python examples/benchmarks/run.py decode --models ToST "ToST conv token" --positions 10 10000
    python examples/benchmarks/run.py decode --models GPT-2 --folders tost-hybrid-base --positions 10 10000
    python examples/benchmarks/run.py decode --static --compile --batch 1 64 1024   # the fastest mode (default on a GPU)

Random weights (they do not change the cost). The small models, ToST of 7 layers and GPT-2 of 6, have about 21 million
parameters without the tables of positions, whose look-up is free; --folders adds models of folders, of which only the
configuration is read. Decodes one token per step from a cache of all tokens before the position; the models are interleaved.
`--static` uses static caches, GPT-2's just long enough for the position; `--compile` compiles the step (with CUDA graphs on a
GPU; a model for which they are skipped is not timed). With a static cache transformers passes an explicit mask to GPT-2's
attention, which excludes PyTorch's flash kernel. Reports the time of a step (for the whole batch), tokens per second, the
bytes of the cache, and without `--static` the peak memory of a forward pass over one sequence up to the position, beyond the
loaded model.
"""

import argparse
import copy
from pathlib import Path

import torch
import torch._inductor.config
from language_models import NO_STATISTICS, OPTIONS, find_cache_name, make_language_model
from records import Spread
from registry import benchmark
from timing import Report, attempt, dtype_name, measure, peak_bytes, ratio, spread
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel, StaticCache


SIZES = {  # vocabulary, width, and layers of ToST and GPT-2
    "base": {"vocab_size": 50304, "width": 768, "layers": (12, 12)},
    "small": {"vocab_size": 4096, "width": 512, "layers": (7, 6)},
}
MODELS = (*(name for name in OPTIONS if name != NO_STATISTICS), "GPT-2")


def cache_tensors(cache) -> list[torch.Tensor]:
    """The floating-point tensors that the layers store, without the length."""
    attributes = (x for layer in cache.layers for x in vars(layer).values())
    values = (x for attribute in attributes for x in (attribute.values() if isinstance(attribute, dict) else [attribute]))
    return [x for x in values if isinstance(x, torch.Tensor) and x.is_floating_point()]


class DynamicSteps:
    """Decoding steps with a dynamic cache; `reset` restores it."""

    def __init__(self, model, token, position: int, steps: int, compiled: bool):
        self.model, self.token, self.steps, self.cache_name = model, token, steps, find_cache_name(model)
        model(token[:1])  # warm-up: allocations of the first pass do not count
        self.prefilled_cache = DynamicCache(config=model.config)
        prefix = torch.randint(0, model.config.vocab_size, (1, position), device=token.device)
        self.peak = peak_bytes(
            lambda: model(prefix, **{self.cache_name: self.prefilled_cache}, logits_to_keep=1), token.device
        )
        if len(token) > 1:  # which the layers of Mamba-2's cache do not support
            self.prefilled_cache.batch_repeat_interleave(len(token))
        self.reset()

    def reset(self):
        self.cache = copy.deepcopy(self.prefilled_cache)

    def __call__(self):
        for _ in range(self.steps):
            self.model(self.token, **{self.cache_name: self.cache})


class StaticSteps:
    """Decoding steps with a static cache; `reset` restores its length.

    The cache is filled with random numbers: the cost is the same, and no prefill has to fit into memory.
    """

    peak = None

    def __init__(self, model, token, position: int, steps: int, compiled: bool):
        self.token, self.position, self.steps, self.cache_name = token, position, steps, find_cache_name(model)
        self.cache = StaticCache(config=model.config, max_cache_len=position + steps)
        model(token, **{self.cache_name: self.cache})  # allocates the cache; not compiled, as in generate()
        for tensor in cache_tensors(self.cache):
            tensor.uniform_(0.5, 1)
        mode = "reduce-overhead" if token.is_cuda else "default"  # reduce-overhead uses CUDA graphs
        self.call = torch.compile(model.forward, mode=mode, dynamic=False) if compiled else model
        self.reset()

    def reset(self):
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.position)

    def __call__(self):
        for _ in range(self.steps):
            torch.compiler.cudagraph_mark_step_begin()
            self.call(self.token, **{self.cache_name: self.cache})


def start_steps(steps_class, *args):
    """Creates a model's decoding steps and runs them once, to compile and check them."""
    steps = steps_class(*args)
    steps()
    return steps


@torch.no_grad()
def benchmark_batch(models, batch: int, positions, args, report: Report) -> None:
    """Measures and reports one batch size."""
    torch.compiler.reset()
    vocab_size = min(model.config.vocab_size for model in models.values())
    token = torch.randint(0, vocab_size, (batch, 1), device=args.device)
    steps_class = StaticSteps if args.static else DynamicSteps
    runs = {}
    for position in positions:
        for name, model in models.items():
            steps = attempt(name, start_steps, steps_class, model, token, position, args.steps, args.compile)
            if steps is not None:
                runs[name, position] = steps
    seconds = measure(runs, args.repeats, device=args.device, reset=lambda name: runs[name].reset())
    for (name, position), steps in runs.items():
        layers = models[name].config.num_hidden_layers
        case = {"model": name, "position": position, "batch": batch, "layers": layers, "dtype": dtype_name(args.dtype)}
        case |= {"cache": "static" if args.static else "dynamic", "code": "compiled" if args.compile else "eager"}
        step = spread(seconds[name, position]) * (1 / args.steps)
        baseline = seconds.get(("GPT-2", position))
        steps.reset()  # the cache has the tokens before the position again
        metrics = {
            "ms a step": step * 1e3,
            "tokens/s": Spread(batch / step.value, batch / step.high, batch / step.low),
            "cache bytes": sum(x.nbytes for x in cache_tensors(steps.cache)),
            "GPT-2 / this": ratio(baseline, seconds[name, position]) if baseline else None,
        }
        if not args.static:
            metrics["forward peak MiB"] = steps.peak / 2**20
        report.add(case, metrics)


def make_model_of_folder(folder: str, max_length: int) -> PreTrainedModel:
    """A model with random weights of a folder's configuration, with positions for `max_length` tokens."""
    config = AutoConfig.from_pretrained(folder)
    if getattr(config, "max_position_embeddings", max_length) < max_length:
        config.max_position_embeddings = max_length
    return AutoModelForCausalLM.from_config(config)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="*", choices=MODELS, default=["ToST", "GPT-2"])
    parser.add_argument("--size", choices=SIZES, default="base")
    parser.add_argument("--folders", nargs="+", metavar="FOLDER", default=[], help="folders of further models")
    parser.add_argument("--positions", type=int, nargs="+", help="default: 10 100 1000; 1024 on a GPU")
    parser.add_argument("--batch", type=int, nargs="+", help="default: 1; 1 64 1024 on a GPU")
    parser.add_argument("--steps", type=int, help="consecutive tokens in one timed run; default: 1; 16 on a GPU")
    parser.add_argument("--static", action=argparse.BooleanOptionalAction, help="default: on a GPU")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="default: on a GPU")


@benchmark("decode", __doc__, add_arguments, dtype=True)
def run(args: argparse.Namespace, report: Report) -> None:
    on_gpu = args.device == "cuda"
    args.static = on_gpu if args.static is None else args.static
    args.compile = on_gpu if args.compile is None else args.compile
    args.steps = args.steps or (16 if on_gpu else 1)
    batches = args.batch or ([1, 64, 1024] if on_gpu else [1])
    positions = args.positions or ([1024] if on_gpu else [10, 100, 1000])
    if args.compile and not args.static:
        raise SystemExit("--compile needs --static: a growing cache would be compiled again at every step")
    torch._inductor.config.triton.cudagraph_or_error = True  # without CUDA graphs a step would measure the host's launches
    torch.manual_seed(0)
    max_length = max(1024, max(positions) + args.steps)
    sizes = SIZES[args.size] | {"head_dim": 64, "context": max_length}
    tost_layers, baseline_layers = sizes.pop("layers")
    models = {
        name: make_language_model(name, layers=tost_layers if name in OPTIONS else baseline_layers, **sizes)
        for name in args.models
    }
    models |= {Path(folder).name: make_model_of_folder(folder, max_length) for folder in args.folders}
    models = {name: model.eval().to(args.device, args.dtype) for name, model in models.items()}
    for batch in batches:
        benchmark_batch(models, batch, positions, args, report)
