# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Continues a prompt, without PyTorch and tost_hf: python generate.py "Once upon a time" --tokens 50"""

import argparse
import json
import os
import sys
from pathlib import Path

import numpy as np
from runtime import LanguageModel, load


FOLDER = Path(__file__).parent


def sample_token(logits: np.ndarray, temperature: float, top_k: int, top_p: float, rng: np.random.Generator) -> int:
    """The most probable token at temperature 0; otherwise a sampled one, with transformers' order of these settings."""
    if temperature == 0:
        return int(logits.argmax())
    tokens = np.argsort(-logits)[: top_k or None]  # 0: no limit
    weights = np.exp((logits[tokens] - logits.max()) / temperature, dtype=np.float64)
    weights /= weights.sum()
    weights *= weights.cumsum() - weights < top_p  # the fewest tokens whose probabilities sum to top_p
    return int(rng.choice(tokens, p=weights / weights.sum()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt")
    parser.add_argument("--tokens", type=int, default=50, help="maximum number of new tokens")
    parser.add_argument("--temperature", type=float, help="0 for greedy decoding (default: that of generation_config.json)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if sys.stdout.errors == "strict":  # its encoding may lack characters of the output
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # before its import, which warns if there is no PyTorch
    from transformers import AutoTokenizer, GenerationConfig

    metadata = json.loads((FOLDER / "export.json").read_text(encoding="utf-8"))
    config, tokenizer = GenerationConfig.from_pretrained(FOLDER), AutoTokenizer.from_pretrained(FOLDER)
    prompt_ids = tokenizer(args.prompt)["input_ids"]
    if not prompt_ids and config.bos_token_id is None:
        parser.error("The prompt is empty, and the model has no token to begin with.")
    ids = prompt_ids or [config.bos_token_id]
    max_length = metadata["max_position_embeddings"] or len(ids) + args.tokens
    if len(ids) > max_length:
        parser.error(f"The prompt has {len(ids)} tokens; the model has positions for {max_length}.")
    temperature = args.temperature
    if temperature is None:
        temperature = (1.0 if config.temperature is None else config.temperature) if config.do_sample else 0.0
    top_k = 50 if config.top_k is None else config.top_k  # the defaults of transformers' `generate`
    top_p = 1.0 if config.top_p is None else config.top_p
    model, rng = LanguageModel(load(FOLDER, metadata), metadata), np.random.default_rng(args.seed)
    new_ids: list[int] = []
    for _ in range(min(args.tokens, max_length - len(ids))):
        logits = model.forward(np.array([new_ids[-1:] or ids], np.int64))
        new_ids.append(sample_token(logits[0, -1], temperature, top_k, top_p, rng))
        if new_ids[-1] in np.atleast_1d(config.eos_token_id):
            break
    # an empty prompt's first token is part of the output, as in transformers' pipeline
    print(args.prompt + tokenizer.decode(ids[len(prompt_ids) :] + new_ids, skip_special_tokens=True))


if __name__ == "__main__":
    main()
