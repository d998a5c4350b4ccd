# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Training speed by sequence length: ToST beside transformers' GPT-2 (PyTorch's attention) and Mamba-2.

    python examples/benchmarks/run.py train_lm

Random tokens, no dropout; forward, backward and a step of AdamW; the batch size is the tokens of a step divided by the length.
On a GPU the models have ToST-base's width and depth and are compiled, under bfloat16 autocast with float32 weights; on a CPU
they are small and in float32. GPT-2's attention is marked as causal, so that a GPU uses the flash kernel. The models are
interleaved, and each length is reported as soon as it is measured. `--equal width` compares models of the same width and
number of layers; `--equal parameters` chooses the number of layers of ToST and Mamba-2 that is closest to GPT-2's parameters.
Mamba-2 without the mamba_ssm package runs in plain PyTorch.
"""

import argparse
import gc

import torch
from language_models import make_language_model
from registry import benchmark
from timing import Report, attempt, dtype_name, measure, peak_bytes, ratio, spread
from torch.nn import functional as F
from transformers import AttentionInterface


SIZES = {  # width, layers, heads, vocabulary
    "base": (768, 12, 12, 50304),
    "small": (256, 4, 4, 4096),
    "toy": (64, 1, 2, 128),
}
MODELS = ("ToST", "GPT-2", "Mamba-2")
LENGTHS = {"cpu": (256, 512, 1024), "cuda": (1024, 4096, 16384)}


def causal_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    """PyTorch's attention for sequences without padding or packing, in transformers' interface.

    Under torch.compile transformers passes a dense mask to its own attention, because sequences could be packed, which
    excludes the flash kernel.
    """
    output = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=dropout, scale=scaling)
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register("causal_sdpa", causal_attention)


def build(name: str, size: str, layers: int, length: int):
    """A model of a named size, for sequences of this length."""
    width, _, heads, vocab_size = SIZES[size]
    options = {"head_dim": width // heads, "context": length}
    if name == "Mamba-2":  # as published
        options = {"head_dim": 64, "context": None, "inner": 128, "chunk_size": 256}
    model = make_language_model(name, vocab_size=vocab_size, width=width, layers=layers, **options)
    if name == "GPT-2":
        model.set_attn_implementation("causal_sdpa")
        model.loss_type = "ForCausalLM"  # the default, set to avoid a warning that breaks the compiled graph
    return model


def count_parameters(*model) -> int:
    with torch.device("meta"):
        return build(*model).num_parameters()


def match_layers(name: str, size: str, length: int, parameters: int) -> int:
    """The number of layers of a model that is closest to a number of parameters."""
    with_one, with_two = (count_parameters(name, size, layers, length) for layers in (1, 2))
    return max(1, 1 + round((parameters - with_one) / (with_two - with_one)))


class TrainingStep:
    """A training step of a model; its peak memory includes weights, gradients and the optimizer's state."""

    def __init__(self, name: str, layers: int, length: int, args):
        batch = max(args.tokens // length, 1)
        self.tokens = torch.randint(0, SIZES[args.size][-1], (batch, length), device=args.device)
        self.device, self.dtype = args.device, args.dtype
        self.peak = peak_bytes(lambda: self.prepare(name, layers, length, args), args.device)

    def prepare(self, name, layers, length, args):
        torch.manual_seed(0)
        model = build(name, args.size, layers, length).to(self.device).train()
        self.parameters = model.num_parameters()
        self.optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        self.model = torch.compile(model, dynamic=False) if args.compile else model
        for _ in range(2):
            self.run()

    def run(self):
        with torch.autocast(self.device, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            loss = self.model(input_ids=self.tokens, labels=self.tokens, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def benchmark_length(length: int, equal: str, args, report: Report) -> None:
    """Measures and reports one length."""
    torch.compiler.reset()
    gc.collect()  # compiled models of the previous length are in reference cycles
    size_layers = SIZES[args.size][1]
    steps = {}
    for name in args.models:
        layers = size_layers
        if equal == "parameters" and name != "GPT-2":
            layers = match_layers(name, args.size, length, count_parameters("GPT-2", args.size, size_layers, length))
        step = attempt(name, TrainingStep, name, layers, length, args)
        if step is not None:
            steps[name] = (step, layers)
    seconds = measure({name: step.run for name, (step, _) in steps.items()}, args.repeats, device=args.device)
    for name, (step, layers) in steps.items():
        batch = len(step.tokens)
        case = {"model": name, "T": length, "batch": batch, "sizes": f"equal {equal}", "size": args.size}
        case |= {"dtype": dtype_name(args.dtype), "code": "compiled" if args.compile else "eager"}
        metrics = {
            "tokens/s": spread(batch * length / s for s in seconds[name]),
            "GPT-2 / this": ratio(seconds["GPT-2"], seconds[name]) if "GPT-2" in seconds else None,
            "peak MiB": step.peak / 2**20,
        }
        report.add(case, metrics | {"layers": layers, "parameters": step.parameters})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", choices=SIZES, help="default: base on a GPU, small on a CPU")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--lengths", type=int, nargs="+", help="default: 1024 4096 16384 on a GPU, 256 512 1024 on a CPU")
    parser.add_argument("--equal", nargs="+", choices=("width", "parameters"), default=("width", "parameters"))
    parser.add_argument("--tokens", type=int, help="tokens per step; default: 16384 on a GPU, 1024 on a CPU")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="default: on a GPU")


@benchmark("train_lm", __doc__, add_arguments, dtype=True)
def run(args: argparse.Namespace, report: Report) -> None:
    on_gpu = args.device == "cuda"
    args.size = args.size or ("base" if on_gpu else "small")
    args.tokens = args.tokens or (16384 if on_gpu else 1024)
    args.compile = on_gpu if args.compile is None else args.compile
    for equal in args.equal:
        for length in dict.fromkeys(args.lengths or LENGTHS[args.device]):
            benchmark_length(length, equal, args, report)
