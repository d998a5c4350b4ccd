# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Fine-tunes a ToST language model on a text and lets it write: one file to copy, with datasets, Trainer and generate.

    python examples/minimal_clm.py text.txt

run_clm.py adds resuming, streaming of large corpora, several processes, curves, a model card and every option.
"""

import argparse
from itertools import chain

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, default_data_collator, set_seed

from tost_hf import ToSTTrainer, ToSTTrainingArguments


def load_blocks(path, tokenizer, block_size):
    """A data set of blocks of tokens, and one of the last twentieth of them, to evaluate on."""

    def split_into_blocks(examples):
        tokens = list(chain.from_iterable(tokenizer(examples["text"]).input_ids))
        blocks = [tokens[i : i + block_size] for i in range(0, len(tokens) - block_size + 1, block_size)]
        return {"input_ids": blocks, "labels": blocks}  # the model shifts the labels

    lines = load_dataset("text", data_files=path, keep_linebreaks=True, split="train")
    blocks = lines.map(split_into_blocks, batched=True, batch_size=None, remove_columns="text")
    if len(blocks) < 2:
        raise SystemExit(f"{path} has fewer than {2 * block_size} tokens: take a longer text or a smaller --block_size.")
    return blocks.train_test_split(test_size=max(1, len(blocks) // 20), shuffle=False)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", help="a text file of a few hundred KB or more")
    parser.add_argument("--model", default="model_cards/trained/tost-books-3m", help="a folder or a repository of the Hub")
    parser.add_argument("--output_dir", default="my-minimal-tost", help="the folder of the trained model")
    parser.add_argument("--block_size", type=int, default=256, help="tokens of a training example (default: 256)")
    parser.add_argument("--epochs", type=float, default=1, help="passes over the text (default: 1)")
    parser.add_argument("--prompt", default="It was a dark night, and", help="what the trained model continues")
    args = parser.parse_args()
    set_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model)
    data = load_blocks(args.text, tokenizer, args.block_size)
    trainer = ToSTTrainer(
        model,
        ToSTTrainingArguments(
            args.output_dir,
            num_train_epochs=args.epochs,
            per_device_train_batch_size=8,
            learning_rate=1e-3,
            eval_strategy="epoch",
            eval_on_start=True,
            logging_steps=10,
            save_strategy="no",
        ),
        train_dataset=data["train"],
        eval_dataset=data["test"],
        data_collator=default_data_collator,
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model()  # with the tokenizer: AutoModelForCausalLM.from_pretrained(args.output_dir) loads it

    inputs = tokenizer(args.prompt, return_tensors="pt").to(model.device)
    tokens = model.generate(**inputs, max_new_tokens=60, do_sample=True, top_p=0.95)
    print(tokenizer.decode(tokens[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
