# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Fine-tunes the small text model of this repository to write Python, in a minute of two CPU cores and without a network.

    python examples/demo.py --output_dir tost-demo

The training text is the source of the running interpreter's standard library. `run_clm.py` trains the model of
`model_cards/trained`, which has read books, on it. The saved model is loaded with transformers' Auto classes and continues a
prompt, as does the model of books.
"""

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import script_setup  # noqa: F401
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

import tost_hf  # noqa: F401  registers the models with the Auto classes


PRETRAINED = Path(__file__).parents[1] / "model_cards/trained/tost-books-3m"
STEPS = 80  # of 2,048 tokens, in about a minute of two CPU cores
PROMPT = "def read_lines(filename):\n"


def write_dataset(folder: Path) -> tuple[Path, Path]:
    """Writes the standard library's top-level modules as JSON lines; every twentieth is for validation."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    files = folder / "train.jsonl", folder / "validation.jsonl"
    with open(files[0], "w") as train, open(files[1], "w") as validation:
        for i, module in enumerate(modules):
            text = module.read_text(encoding="utf-8", errors="replace")
            (validation if i % 20 == 0 else train).write(json.dumps({"text": text}) + "\n")
    print(f"Text: {len(modules)} modules of {sys.version.split()[0]}'s standard library, {len(modules) // 20 + 1} held out.")
    return files


def run_clm(**arguments) -> None:
    """Runs run_clm.py as a user would, without a network; a flag's value is True."""
    command = [sys.executable, str(Path(__file__).with_name("run_clm.py"))]
    for name, value in arguments.items():
        command += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    print("$", " ".join(command), flush=True)
    status = subprocess.run(command, env=os.environ | {"HF_HUB_OFFLINE": "1"}).returncode
    if status:
        sys.exit(status)  # the script has said why


def train(files: tuple[Path, Path], output_dir: str, steps: int) -> None:
    """Trains the model; the script prints the loss on the modules held out, before and after."""
    run_clm(
        model_name_or_path=PRETRAINED,
        train_file=files[0],
        validation_file=files[1],
        block_size=256,
        do_train=True,
        do_eval=True,
        max_eval_samples=200,
        max_steps=steps,
        learning_rate=2e-3,
        lr_scheduler_type="cosine",
        warmup_steps=0.1,
        per_device_train_batch_size=8,
        save_strategy="no",
        output_dir=output_dir,
        report_to="none",
    )


def continue_prompt(folder: str | Path) -> str:
    """The prompt with a sampled continuation."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    tokens = model.generate(**inputs, max_new_tokens=100, do_sample=True, temperature=0.7, top_p=0.95)
    return tokenizer.decode(tokens[0], skip_special_tokens=True)


def show_results(output_dir: str) -> None:
    transformers.utils.logging.disable_progress_bar()
    for folder in (PRETRAINED, output_dir):
        print(f"\nWritten by {folder}:\n\n{continue_prompt(folder)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", default="tost-demo", help="the folder of the trained model")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"optimizer steps of 2,048 tokens (default: {STEPS})")
    args = parser.parse_args()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        train(write_dataset(Path(scratch)), args.output_dir, args.steps)
    show_results(args.output_dir)
    print(f"\nThe whole demo took {time.perf_counter() - start:.0f} s. The model is in {args.output_dir}.")


if __name__ == "__main__":
    main()
