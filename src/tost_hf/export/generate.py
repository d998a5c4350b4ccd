# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Continues a prompt, without tost_hf: python generate.py "Once upon a time" --tokens 50"""

import argparse
import json
from pathlib import Path

import numpy as np
from runtime import LanguageModel, load
from tokenizers import Tokenizer


FOLDER = Path(__file__).parent


def choose(logits: np.ndarray, temperature: float, random: np.random.Generator) -> int:
    """The most probable token, or a sampled one if the temperature is not 0."""
    if temperature == 0:
        return int(logits.argmax())
    weights = np.exp((logits - logits.max()) / temperature, dtype=np.float64)
    return int(random.choice(len(weights), p=weights / weights.sum()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt")
    parser.add_argument("--tokens", type=int, default=50, help="maximum number of new tokens")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 for greedy decoding")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if not (FOLDER / "tokenizer.json").is_file():
        parser.exit(1, "There is no tokenizer.json here: put the model's beside this script.\n")
    facts = json.loads((FOLDER / "export.json").read_text(encoding="utf-8"))
    tokenizer, model = Tokenizer.from_file(str(FOLDER / "tokenizer.json")), LanguageModel(load(FOLDER, facts), facts)
    tokens, random = tokenizer.encode(args.prompt).ids, np.random.default_rng(args.seed)
    if not tokens:
        parser.exit(1, "The prompt is empty.\n")
    limit = facts["max_position_embeddings"] or len(tokens) + args.tokens
    if len(tokens) > limit:
        parser.exit(1, f"The prompt has {len(tokens)} tokens; the model has positions for {limit}.\n")
    end, logits = facts["eos_token_id"], model.read(np.array([tokens], np.int64))
    for _ in range(min(args.tokens, limit - len(tokens))):
        token = choose(logits[0, -1], args.temperature, random)
        if token in (end if isinstance(end, list) else [end]):
            break
        tokens.append(token)
        logits = model.read(np.array([[token]], np.int64))
    print(tokenizer.decode(tokens))


if __name__ == "__main__":
    main()
