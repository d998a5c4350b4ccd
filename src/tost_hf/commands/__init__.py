# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Subcommands of `tost-hf`, each a function that adds its parser and one that runs it."""

import argparse
import textwrap
from collections.abc import Callable


def add_command(
    commands, name: str, run: Callable, *, summary: str, description: str, examples: tuple[str, ...]
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=summary,
        description=textwrap.fill(description, 100),
        epilog="examples:\n" + "\n".join(f"  tost-hf {name} {example}" for example in examples),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


__all__ = ["add_command"]
