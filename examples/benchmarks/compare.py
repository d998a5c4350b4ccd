# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Times two commits in interleaved rounds: the working tree and another one, by default main.

    python examples/benchmarks/compare.py main
    make compare REF=main

Each commit's package is imported by a process of its own, the other commit's from a temporary git worktree. Times the causal
operator (forward, and forward and backward), a decoding step and a training step of a model with decay per token and a short
convolution. Prints the median of the rounds and, with its range, the ratio per round. Exits with 1 if a commit is more than
10 % slower at a workload, both by the median of the ratios and by its fastest round, as other load on the machine changes one
of the two. Nothing is recorded.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from records import ROOT, format_table
from timing import KEEP_FREED_MEMORY, format_spread, measure, ratio, spread

import tost_hf


MAX_RATIO = 1.1
WORKING_TREE = "working tree"
VOCAB_SIZE, HEAD_DIM = 4096, 64


# The process of a commit: what it runs uses only the API that all commits have ----------------------------------------


def make_workloads(device: str, batch: int, tokens: int, width: int, layers: int) -> dict[str, Callable[[], object]]:
    torch.manual_seed(0)
    heads = width // HEAD_DIM
    w = torch.randn(batch, tokens, heads, HEAD_DIM, device=device, requires_grad=True)
    temp = torch.ones(heads, device=device, requires_grad=True)
    config = tost_hf.ToSTConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=None,  # and forgetting: names that earlier commits know, too
        bos_token_id=None,
        eos_token_id=None,
        forgetting="token",
        conv_kernel=4,
    )
    model = tost_hf.ToSTForCausalLM(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    input_ids = torch.randint(VOCAB_SIZE, (batch, tokens), device=device)
    with torch.no_grad():
        cache = model(input_ids, use_cache=True).past_key_values

    @torch.no_grad()
    def forward():
        tost_hf.tssa(w, temp)

    def forward_backward():
        tost_hf.tssa(w, temp)[0].sum().backward()

    @torch.no_grad()
    def decode():
        model(input_ids[:, :1], past_key_values=cache, use_cache=True)

    def train():
        model(input_ids, labels=input_ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return {
        "operator, forward": forward,
        "operator, forward + backward": forward_backward,
        "decoding step": decode,
        "training step": train,
    }


def serve_workloads(sizes: dict) -> None:
    """Prints the package's file and the workloads' names, then runs the workload named on each line of stdin and answers."""
    workloads = make_workloads(**sizes)
    print(json.dumps([tost_hf.__file__, list(workloads)]), flush=True)
    for line in sys.stdin:
        workloads[line.strip()]()
        if sizes["device"] == "cuda":
            torch.cuda.synchronize()
        print(flush=True)


# The process that compares --------------------------------------------------------------------------------------------


class CommitProcess:
    """A process that imports the package from `root` and runs its workloads."""

    def __init__(self, root: Path, sizes: dict):
        command = [sys.executable, __file__, "--serve", json.dumps(sizes)]
        env = os.environ | KEEP_FREED_MEMORY | {"PYTHONPATH": str(root / "src")}
        self.root = root
        self.process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def read_workloads(self) -> list[str]:
        file, workloads = json.loads(self.read())
        if not Path(file).is_relative_to(self.root):
            raise RuntimeError(f"{self.root} has no package tost_hf in src; {file} was imported.")
        return workloads

    def read(self) -> str:
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args} ended, see its message above.")
        return line

    def run(self, workload: str) -> None:
        print(workload, file=self.process.stdin, flush=True)
        self.read()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.process.communicate()  # closes stdin, which ends it


@contextmanager
def checked_out(ref: str):
    """A temporary git worktree of a commit."""
    git = ("git", "-C", str(ROOT), "worktree")
    with TemporaryDirectory() as folder:
        root = Path(folder) / "commit"
        subprocess.run([*git, "add", "--quiet", "--detach", str(root), ref], check=True)
        try:
            yield root
        finally:
            subprocess.run([*git, "remove", "--force", str(root)], check=True)


def compare(ref: str, sizes: dict, repeats: int) -> dict[tuple[str, str], list[float]]:
    """Seconds of each pair of a workload and a commit, in each round."""
    with ExitStack() as stack:
        roots = {WORKING_TREE: ROOT, ref: stack.enter_context(checked_out(ref))}
        processes = {name: stack.enter_context(CommitProcess(root, sizes)) for name, root in roots.items()}
        workloads, _ = (process.read_workloads() for process in processes.values())
        runs = {
            (workload, commit): lambda process=process, workload=workload: process.run(workload)
            for workload in workloads
            for commit, process in processes.items()
        }
        return measure(runs, repeats)  # on a GPU, too: a workload is answered when it has ended


def report(seconds: Mapping[tuple[str, str], list[float]], ref: str) -> int:
    """Prints a table and returns the exit status."""
    lines, status = [], 0
    for workload in dict.fromkeys(workload for workload, _ in seconds):
        new, old = seconds[workload, WORKING_TREE], seconds[workload, ref]
        relative = ratio(new, old)
        ratios, verdict = (relative.value, min(new) / min(old)), ""
        if min(ratios) > MAX_RATIO or max(ratios) < 1 / MAX_RATIO:
            verdict, status = f"{WORKING_TREE if min(ratios) > 1 else ref} is slower", 1
        milliseconds = [f"{spread(times).value * 1e3:.3g}" for times in (new, old)]
        lines.append([workload, *milliseconds, format_spread(relative), verdict])
    print(format_table(["workload", f"{WORKING_TREE}, ms", f"{ref}, ms", f"{WORKING_TREE} / {ref}", ""], lines))
    return status


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ref", nargs="?", default="main", help="a commit, branch or tag")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--repeats", type=int, default=15, help="rounds")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=512, help="per sequence, and before the decoding step")
    parser.add_argument("--width", type=int, default=512, help=f"of the model, a multiple of {HEAD_DIM}")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--serve", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.serve:
        serve_workloads(args.serve)
        return 0
    sizes = {name: getattr(args, name) for name in ("device", "batch", "tokens", "width", "layers")}
    return report(compare(args.ref, sizes, args.repeats), args.ref)


if __name__ == "__main__":
    sys.exit(main())
