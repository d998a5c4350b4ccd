# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Trains a small ToST language model that writes Python, in a few CPU minutes and without a network.

    python examples/demo.py --output_dir tost-demo

The training text is the source of the running interpreter's standard library. A byte-level BPE tokenizer is trained on it.
Then `run_clm.py` trains a ToST with two options beyond the paper, decay and a short convolution, which reach a lower loss than
ToST as published. The saved model is loaded with transformers' Auto classes and continues a prompt.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedTokenizerFast, TextStreamer

import tost_hf  # noqa: F401  registers the models with the Auto classes
from tost_hf.files import EVAL_RESULTS


END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 2048
BLOCK_SIZE = 256
CONFIG = {
    "n_layer": 4,
    "n_head": 4,
    "hidden_size": 192,
    "n_positions": BLOCK_SIZE,
    "vocab_size": VOCAB_SIZE,
    "layer_scale_init_value": 0.3,  # the published 1e-5 needs longer training
    "forgetting": "token",
    "conv_kernel": 4,
}
STEPS = 500  # of 2,048 tokens, in about three minutes of one CPU core
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


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE tokenizer like GPT-2's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def train_tokenizer(texts: Iterable[str], folder: Path, vocab_size: int, max_length: int | None) -> None:
    """Trains and saves a tokenizer, which warns about more than `max_length` tokens (None: no warning)."""
    PreTrainedTokenizerFast(
        tokenizer_object=train_bpe(texts, vocab_size),
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        model_max_length=max_length,
        chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}",  # the model continues the text
    ).save_pretrained(folder)


def run_clm(**arguments) -> None:
    """Runs run_clm.py as a user would, without a network; a flag's value is True."""
    command = [sys.executable, str(Path(__file__).with_name("run_clm.py"))]
    for name, value in arguments.items():
        command += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    print("$", " ".join(command), flush=True)
    subprocess.run(command, check=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})


def train(files: tuple[Path, Path], tokenizer: Path, output_dir: str, steps: int) -> None:
    """Trains the model and evaluates it after the last step."""
    run_clm(
        config_name="tost-base",
        config_overrides=",".join(f"{name}={value}" for name, value in CONFIG.items()),
        tokenizer_name=tokenizer,
        train_file=files[0],
        validation_file=files[1],
        block_size=BLOCK_SIZE,
        do_train=True,
        do_eval=True,
        max_steps=steps,
        learning_rate=5e-3,
        lr_scheduler_type="cosine",
        warmup_steps=0.1,
        per_device_train_batch_size=8,
        logging_steps=50,
        save_strategy="no",
        output_dir=output_dir,
        report_to="none",
    )


def time_decoding_step(model, position: int) -> float:
    """Median seconds of one new token after `position` tokens."""
    tokens = torch.randint(0, model.config.vocab_size, (1, position + 1))
    seconds = []
    for _ in range(15):
        cache = DynamicCache(config=model.config)
        if position:
            model(tokens[:, :position], past_key_values=cache)
        start = time.perf_counter()
        model(tokens[:, position:], past_key_values=cache)
        seconds.append(time.perf_counter() - start)
    return sorted(seconds)[len(seconds) // 2]


@torch.no_grad()
def show_results(output_dir: str) -> None:
    loss = json.loads((Path(output_dir) / EVAL_RESULTS).read_text())["eval_loss"]
    print(f"\nValidation loss: {loss:.3f} nats per token, a perplexity of {math.exp(loss):.1f}; untrained, {VOCAB_SIZE:,}.")
    model = AutoModelForCausalLM.from_pretrained(output_dir).eval()
    tokenizer = AutoTokenizer.from_pretrained(output_dir)
    print(f"Reloaded {output_dir} as {type(model).__name__}, {model.num_parameters():,} parameters. A sampled continuation:\n")
    inputs = tokenizer(PROMPT, return_tensors="pt")
    torch.manual_seed(0)
    output = model.generate(
        **inputs,
        max_new_tokens=100,
        do_sample=True,
        temperature=0.7,
        top_p=0.95,
        pad_token_id=tokenizer.eos_token_id,
        streamer=TextStreamer(tokenizer, skip_special_tokens=True),
        return_dict_in_generate=True,
    )
    size = sum(layer.nbytes for layer in output.past_key_values.layers)
    print(f"\nThe cache after {output.past_key_values.get_seq_length()} tokens has {size:,} bytes, as after the first one.")
    first, last = time_decoding_step(model, 0), time_decoding_step(model, BLOCK_SIZE - 1)
    print(f"A new token takes {first * 1e3:.2f} ms at the first position, {last * 1e3:.2f} ms at position {BLOCK_SIZE}.")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", default="tost-demo", help="the folder of the trained model; replaced if it exists")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"optimizer steps of 2,048 tokens (default: {STEPS})")
    args = parser.parse_args()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        files = write_dataset(scratch)
        with open(files[0]) as lines:
            train_tokenizer((json.loads(line)["text"] for line in lines), scratch / "tokenizer", VOCAB_SIZE, BLOCK_SIZE)
        if (Path(args.output_dir) / "config.json").is_file():
            shutil.rmtree(args.output_dir)  # of an earlier demo
        train(files, scratch / "tokenizer", args.output_dir, args.steps)
    show_results(args.output_dir)
    print(f"\nThe whole demo took {time.perf_counter() - start:.0f} s. The model is in {args.output_dir}.")


if __name__ == "__main__":
    main()
