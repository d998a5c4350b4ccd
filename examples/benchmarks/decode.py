# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""What a new token costs at position 10, 100 and 1,000: a ToST-base-sized model beside transformers' GPT-2 of equal width.

    python examples/benchmarks/decode.py

Random weights (they do not change the cost), batch 1, eager, float32, greedy single-token steps from a cache that holds the
text up to the position. Prints the median time a token, the bytes of the cache, and the peak memory of a forward pass over
1,000 tokens beyond what the loaded model takes; each model in a process of its own.
"""

import argparse
import copy
import multiprocessing

import torch
from timing import interleaved_medians, print_header
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

from tost_hf import ToSTConfig, ToSTForCausalLM


POSITIONS = (10, 100, 1000)


def build(name: str, layers: int):
    """Models of width 768 with 12 heads and 1,024 positions."""
    torch.manual_seed(0)
    if name == "ToST":
        return ToSTForCausalLM(ToSTConfig.from_preset("tost-base", num_hidden_layers=layers)).eval()
    return GPT2LMHeadModel(GPT2Config(vocab_size=50304, n_layer=layers)).eval()


def cache_bytes(cache) -> int:
    tensors = []
    for layer in cache.layers:
        tensors.extend((layer.keys, layer.values) if layer.keys is not None else layer.state)
    return sum(x.nbytes for x in tensors)


def peak_bytes_of(run) -> int:
    """Peak resident memory during `run` beyond what the process holds before it (Linux: the kernel's own high-water mark)."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # sets the mark back to what is resident now
    before = resident_kilobytes("VmRSS")
    run()
    return (resident_kilobytes("VmHWM") - before) * 1024


def resident_kilobytes(field: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field))


@torch.no_grad()
def measure(name: str, layers: int, repeats: int, queue) -> None:
    """Puts (seconds at each position, cache bytes at each, peak bytes) of one model."""
    model = build(name, layers)
    tokens = torch.randint(0, 50304, (1, max(POSITIONS) + 1))
    model(tokens[:, :2])  # what the first pass allocates once
    caches = {position: DynamicCache(config=model.config) for position in POSITIONS}
    for position in POSITIONS[:-1]:
        model(tokens[:, :position], past_key_values=caches[position], logits_to_keep=1)
    last = POSITIONS[-1]
    peak = peak_bytes_of(lambda: model(tokens[:, :last], past_key_values=caches[last], logits_to_keep=1))

    def step(position):
        def prepare():
            cache = copy.deepcopy(caches[position])
            return lambda: model(tokens[:, position : position + 1], past_key_values=cache)

        return prepare

    seconds = interleaved_medians({position: step(position) for position in POSITIONS}, repeats)
    queue.put((seconds, {position: cache_bytes(cache) for position, cache in caches.items()}, peak))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=51)
    args = parser.parse_args()
    print_header()
    print(f"{'':6}{'position':>9}{'ms a token':>12}{'cache bytes':>13}")
    for name in ("ToST", "GPT-2"):
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        process = context.Process(target=measure, args=(name, args.layers, args.repeats, queue))
        process.start()
        seconds, sizes, peak = queue.get()
        process.join()
        for position in POSITIONS:
            print(f"{name:6}{position:9}{seconds[position] * 1e3:12.2f}{sizes[position]:13,}")
        first, last = POSITIONS[0], POSITIONS[-1]
        print(f"{name:6}time at {last} / time at {first}: {seconds[last] / seconds[first]:.3f}")
        print(f"{name:6}peak memory of a forward pass over {last} tokens: {peak / 2**20:.0f} MiB beyond the model")


if __name__ == "__main__":
    main()
