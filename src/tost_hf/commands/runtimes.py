# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The subcommands that deploy models: text at a terminal, a server, other runtimes, a browser, the Hub's kernels."""

import argparse
from pathlib import Path

from . import add_command


def _add_text_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a model folder, or a repository of the Hub")
    parser.add_argument("--revision", help="branch, tag or commit of the repository (default: main)")
    parser.add_argument("--dtype", default="auto", metavar="DTYPE", help="of the weights (default: that of the files)")
    parser.add_argument("--device", default="cpu", metavar="DEVICE", help="cpu (the default), cuda, ...")


def _load_text_model(args: argparse.Namespace):
    from transformers import AutoTokenizer

    from ..model.modeling_tost import ToSTForCausalLM

    model = ToSTForCausalLM.from_pretrained(args.model, revision=args.revision, dtype=args.dtype)
    return model.to(args.device).eval(), AutoTokenizer.from_pretrained(args.model, revision=args.revision)


def add_cache(commands) -> None:
    parser = add_command(
        commands,
        "cache",
        _cache,
        summary="read a long text once, and write the model's state after it to a file",
        description=(
            "Reads a text by chunked prefill, which takes the same memory for every length, and writes the state after it and "
            "its tokens. `tost-hf generate --prefix` and `tost-hf serve --prefix` continue from the file, with the same "
            "model, weights and dtype."
        ),
        examples=("./tost-demo manual.txt manual.safetensors",),
    )
    _add_text_model(parser)
    parser.add_argument("text", metavar="TEXT_FILE", help="the text, in UTF-8")
    parser.add_argument("output", metavar="OUT", help="the .safetensors file to write")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it is there")


def _cache(args: argparse.Namespace) -> None:
    from ..cache_files import prefill_cache, save_cache

    if Path(args.output).exists() and not args.overwrite:
        raise ValueError(f"{args.output} exists already; replace it with --overwrite.")
    text = Path(args.text).read_text(encoding="utf-8")
    model, tokenizer = _load_text_model(args)
    input_ids = tokenizer(text, return_tensors="pt").input_ids
    if not input_ids.numel():
        raise ValueError(f"{args.text} has no text.")
    save_cache(prefill_cache(model, input_ids, progress_bar=True), args.output, model=model, input_ids=input_ids)
    print(f"Wrote {args.output}: {input_ids.shape[1]:,} tokens in {Path(args.output).stat().st_size:,} bytes")


def add_generate(commands) -> None:
    parser = add_command(
        commands,
        "generate",
        _generate,
        summary="continue a text at the terminal",
        description="Prints the text that follows a prompt, or that follows a file of `tost-hf cache` and a prompt.",
        examples=(
            "./tost-demo 'import os'",
            "./tost-demo --prefix manual.safetensors 'How is it switched on?' --max-new-tokens 50",
        ),
    )
    _add_text_model(parser)
    parser.add_argument("prompt", metavar="PROMPT", help="the text to continue")
    parser.add_argument("--prefix", metavar="FILE", help="a text that was read before, written by `tost-hf cache`")
    parser.add_argument("--max-new-tokens", type=int, default=100, metavar="N", help="tokens at most (default: 100)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0, the default: greedy")
    parser.add_argument("--seed", type=int, default=0, help="of the tokens that are sampled (default: 0)")


def _generate(args: argparse.Namespace) -> None:
    import torch
    from transformers import TextStreamer

    from ..cache_files import load_prefix

    model, tokenizer = _load_text_model(args)
    input_ids, cache = tokenizer(args.prompt, return_tensors="pt").input_ids.to(model.device), None
    if args.prefix is not None:
        prefix = load_prefix(args.prefix, model)
        input_ids, cache = prefix.continued_by(input_ids[0].tolist(), tokenizer.bos_token_id), prefix.cache
    torch.manual_seed(args.seed)
    sampling = {"do_sample": True, "temperature": args.temperature} if args.temperature else {"do_sample": False}
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    model.generate(input_ids, past_key_values=cache, max_new_tokens=args.max_new_tokens, streamer=streamer, **sampling)


def add_serve(commands) -> None:
    parser = add_command(
        commands,
        "serve",
        run_serve,
        summary="transformers' OpenAI-compatible server, with ToST in it",
        description=(
            "Starts `transformers serve` with ToST's classes and with limits: answers end at the model's last position, and "
            "a bad request gets an error message and affects no other. Options are those of `transformers serve`, whose "
            "--help lists them. Started with a MODEL, the server loads no other. Without one, each request names a folder or "
            "repository, so let only clients in that may read them. A repository's code runs only with --trust-remote-code "
            "and a MODEL. Prompts continue from the longest prefix that was read before."
        ),
        examples=(
            "./tost-demo --device cpu --port 8000",
            "./tost-demo --prefix manual=manual.safetensors",
            "OWNER/NAME --trust-remote-code",
        ),
    )
    parser.add_argument(
        "--prefix-cache-bytes",
        type=int,
        metavar="N",
        help="size of the prefix cache of each model; 0 for none (default: 2**28)",
    )
    parser.add_argument(
        "--prefix",
        action="append",
        default=[],
        metavar="NAME=FILE",
        help='a file of `tost-hf cache`: prompts that begin with its text, or requests with the field "prefix": NAME, '
        "continue from it; may be repeated",
    )


def run_serve(args: argparse.Namespace) -> None:
    from ..serving.server import serve

    prefixes = dict(prefix.partition("=")[::2] for prefix in args.prefix)
    if len(prefixes) < len(args.prefix) or not all(name and file for name, file in prefixes.items()):
        raise ValueError(f"--prefix needs NAME=FILE, each with another name; got {', '.join(args.prefix)}.")
    serve(args.rest, prefix_files=prefixes, prefix_cache_bytes=args.prefix_cache_bytes)


def _add_model_and_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a model folder, or a repository of the Hub")
    parser.add_argument("output", metavar="OUT", help="the folder to write")
    parser.add_argument("--dtype", default="float32", metavar="DTYPE", help="float32 (the default), float16 or int8")
    parser.add_argument("--revision", help="branch, tag or commit of the repository (default: main)")


def add_export(commands) -> None:
    parser = add_command(
        commands,
        "export",
        _export,
        summary="a model for ONNX Runtime, OpenVINO or torch.export, checked against the model",
        description=(
            "Writes the model as a program for another runtime, with scripts that run it without this package. A text's state "
            "goes in and comes out as tensors: one program reads prompts and single tokens. Its outputs are compared with the "
            "model's first; if they differ nothing is written."
        ),
        examples=(
            "./tost-demo ./tost-onnx",
            "me/my-tost ./tost-onnx --dtype int8",
        ),
    )
    _add_model_and_output(parser)
    parser.add_argument("--format", default="onnx", metavar="FORMAT", help="onnx (the default), openvino, executorch or torch")
    parser.add_argument("--tokenizer", metavar="FOLDER|REPO_ID", help="the tokenizer to write, where MODEL has none")
    parser.add_argument("--overwrite", action="store_true", help="write into a folder that is not empty")


def _export(args: argparse.Namespace) -> None:
    from ..exporting import export_model

    options = {name: getattr(args, name) for name in ("format", "dtype", "tokenizer", "revision", "overwrite")}
    done = export_model(args.model, args.output, **options)
    print(f"{done.agreement}\nWrote {done.folder}")


def add_space(commands) -> None:
    parser = add_command(
        commands,
        "space",
        _space,
        summary="a web page that runs the model in the browser, ready to be a Space of the Hub",
        description=(
            "Writes a folder with a page, the model as ONNX and the JavaScript libraries, which `npm pack` fetches and whose "
            "hashes are checked. The page needs no network: `python -m http.server` in the folder shows "
            "it. `tost-hf publish --space OUT OWNER/NAME` sends it to the Hub."
        ),
        examples=(
            "./tost-demo ./tost-page",
            "me/my-tost ./tost-page --title 'My ToST'",
        ),
    )
    _add_model_and_output(parser)
    parser.add_argument("--tokenizer", metavar="FOLDER|REPO_ID", help="the model's tokenizer, where MODEL has none")
    parser.add_argument("--title", help="the page's title (default: the model's name)")
    parser.add_argument(
        "--npm",
        metavar="FOLDER",
        help="take the JavaScript libraries from this folder of `npm pack` tarballs (default: npm fetches them)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace what is already at OUT")


def _space(args: argparse.Namespace) -> None:
    from ..space import write_space

    options = {name: getattr(args, name) for name in ("dtype", "tokenizer", "title", "npm", "revision", "overwrite")}
    print(f"Wrote {write_space(args.model, args.output, **options)}")


def add_export_kernel(commands) -> None:
    parser = add_command(
        commands,
        "export-kernel",
        _export_kernel,
        summary="the Triton operator alone, in the layout of the Hub's kernels",
        description=("Writes the operator as a `kernels` repository ([torch-noarch]: Triton only, nothing compiled)."),
        examples=("./tssa-kernel",),
    )
    parser.add_argument("output", metavar="OUT", help="the folder to write")
    parser.add_argument("--overwrite", action="store_true", help="replace what is already at OUT")


def _export_kernel(args: argparse.Namespace) -> None:
    from ..hub.kernel_export import export_kernel

    print(f"Wrote {export_kernel(args.output, overwrite=args.overwrite)}")


__all__ = ["add_cache", "add_export", "add_export_kernel", "add_generate", "add_serve", "add_space", "run_serve"]
