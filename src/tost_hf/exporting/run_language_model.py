# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Writes on from a prompt, without the package that wrote the program: python generate.py "Once upon a time" --tokens 50"""

import argparse
import json
from pathlib import Path

import numpy as np
from runtime import load
from tokenizers import Tokenizer


FOLDER = Path(__file__).parent


class LanguageModel:
    """A text that is read token by token; what is kept of it is `state`."""

    def __init__(self, folder: Path):
        self.facts = json.loads((folder / "export.json").read_text(encoding="utf-8"))
        self.run = load(folder, self.facts)
        self.inputs = {spec["name"]: spec for spec in self.facts["inputs"]}
        sizes = {"batch": 1, "cached": 0}  # before the first token
        self.state = {
            spec["input"]: np.zeros([sizes.get(n, n) for n in spec["shape"]], spec["dtype"]) for spec in self.facts["state"]
        }
        self.length = 0

    def read(self, tokens: list[int]) -> np.ndarray:
        """The logits (vocabulary,) of the token after these."""
        start, self.length = self.length, self.length + len(tokens)
        grows = self.inputs["attention_mask"]["shape"] != self.inputs["input_ids"]["shape"]  # attention sees those before, too
        given = {
            "input_ids": np.array([tokens], np.int64),
            "attention_mask": np.ones((1, self.length if grows else len(tokens)), np.int64),
            "position_ids": np.arange(start, self.length)[None],
        }
        given = {name: x for name, x in given.items() if name in self.inputs}
        found = self.run(given | self.state)
        self.state = {spec["input"]: found[spec["output"]] for spec in self.facts["state"]}
        return found["logits"][0, -1]


def choose(logits: np.ndarray, temperature: float, random: np.random.Generator) -> int:
    """The likeliest token, or with a temperature a random one."""
    if temperature == 0:
        return int(logits.argmax())
    weights = np.exp((logits - logits.max()) / temperature, dtype=np.float64)
    return int(random.choice(len(weights), p=weights / weights.sum()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt")
    parser.add_argument("--tokens", type=int, default=50, help="how many to write at most")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 for the likeliest token each time")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if not (FOLDER / "tokenizer.json").is_file():
        parser.exit(1, "There is no tokenizer.json here: put the model's beside this script.\n")
    tokenizer, model = Tokenizer.from_file(str(FOLDER / "tokenizer.json")), LanguageModel(FOLDER)
    tokens, random = tokenizer.encode(args.prompt).ids, np.random.default_rng(args.seed)
    if not tokens:
        parser.exit(1, "The prompt is empty.\n")
    most = model.facts["max_position_embeddings"] or len(tokens) + args.tokens
    if len(tokens) > most:
        parser.exit(1, f"The prompt has {len(tokens)} tokens; the model has positions for {most}.\n")
    end, logits = model.facts["eos_token_id"], model.read(tokens)
    for _ in range(min(args.tokens, most - len(tokens))):
        token = choose(logits, args.temperature, random)
        if token in (end if isinstance(end, list) else [end]):
            break
        tokens.append(token)
        logits = model.read([token])
    print(tokenizer.decode(tokens))


if __name__ == "__main__":
    main()
