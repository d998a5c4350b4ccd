# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Continues a prompt, without tost_hf: python generate.py "Once upon a time" --tokens 50"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
from runtime import LanguageModel, load
from tokenizers import Tokenizer


FOLDER = Path(__file__).parent


def sample_token(logits: np.ndarray, temperature: float, rng: np.random.Generator) -> int:
    """The most probable token at temperature 0, otherwise a sampled one."""
    if temperature == 0:
        return int(logits.argmax())
    weights = np.exp((logits - logits.max()) / temperature, dtype=np.float64)
    return int(rng.choice(len(weights), p=weights / weights.sum()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt")
    parser.add_argument("--tokens", type=int, default=50, help="maximum number of new tokens")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 for greedy decoding")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if sys.stdout.errors == "strict":  # its encoding may lack characters of the output
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    if not (FOLDER / "tokenizer.json").is_file():
        parser.exit(1, "There is no tokenizer.json: copy the model's tokenizer.json to the folder of this script.\n")
    metadata = json.loads((FOLDER / "export.json").read_text(encoding="utf-8"))
    tokenizer, model = Tokenizer.from_file(str(FOLDER / "tokenizer.json")), LanguageModel(load(FOLDER, metadata), metadata)
    ids, rng = tokenizer.encode(args.prompt).ids, np.random.default_rng(args.seed)
    if not ids:
        parser.exit(1, "The prompt is empty.\n")
    max_length = metadata["max_position_embeddings"] or len(ids) + args.tokens
    if len(ids) > max_length:
        parser.exit(1, f"The prompt has {len(ids)} tokens; the model has positions for {max_length}.\n")
    eos_token_id, logits = metadata["eos_token_id"], model.forward(np.array([ids], np.int64))
    for _ in range(min(args.tokens, max_length - len(ids))):
        token = sample_token(logits[0, -1], args.temperature, rng)
        if token in (eos_token_id if isinstance(eos_token_id, list) else [eos_token_id]):
            break
        ids.append(token)
        logits = model.forward(np.array([[token]], np.int64))
    print(tokenizer.decode(ids))


if __name__ == "__main__":
    main()
