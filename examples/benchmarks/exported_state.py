# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""How far a float32 state drifts: an ONNX program that reads a long text token by token, beside the model itself.

    pip install "tost-hf[export]"
    python examples/benchmarks/exported_state.py
    python examples/benchmarks/exported_state.py --tokens 1000

Small models of random weights and random tokens. The program's state is float32 after every token; the model, whose sums are
float64, reads the same text by the thousand. The difference is the largest of the logits at the 100 tokens before each
position, in standard deviations of the model's.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from language_models import make_language_model
from rows import parse_arguments
from timing import Report, arguments, print_header

from tost_hf import CausalStatisticsCache, export_model
from tost_hf.exporting.runtime import LanguageModel, load
from tost_hf.exporting.writing import FACTS


MODELS = ("ToST", "ToST token")
POSITIONS = (100, 1_000, 10_000, 100_000)
COMPARED, AT_ONCE = 100, 1_000
VOCABULARY = 97


@torch.no_grad()
def differences(name: str, tokens: int) -> dict[int, float]:
    """Of each position up to `tokens`."""
    torch.manual_seed(0)
    model = make_language_model(name, vocab_size=VOCABULARY, width=64, layers=2, head_dim=16, context=None).eval()
    ids = torch.randint(VOCABULARY, (1, tokens))
    cache = CausalStatisticsCache(model.config)
    expected = torch.cat([model(part, past_key_values=cache).logits for part in ids.split(AT_ONCE, 1)], 1)[0]
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "model"), Path(folder, "onnx")
        model.save_pretrained(source)
        export_model(source, target)
        facts = json.loads((target / FACTS).read_text(encoding="utf-8"))
        exported = LanguageModel(load(target, facts), facts)
        found = torch.cat([torch.from_numpy(exported.read(token.numpy())[0]) for token in ids.split(1, 1)])
    errors = (found - expected).abs().amax(-1) / expected.std()
    return {n: errors[n - COMPARED : n].max().item() for n in POSITIONS if n <= tokens}


def main(argv: list[str] | None = None) -> int:
    parser = arguments(__doc__, repeats=1)
    parser.add_argument("--tokens", type=int, default=max(POSITIONS))
    args = parse_arguments(parser, argv, __file__)
    print_header(args.device)
    report = Report(args)
    for name in MODELS:
        for position, difference in differences(name, args.tokens).items():
            report.add({"model": name, "position": position}, {"difference": difference})
    return 0


if __name__ == "__main__":
    sys.exit(main())
