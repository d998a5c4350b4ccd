# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The `tost-hf` command: its argument parser, and one function per subcommand."""

import argparse
import inspect
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from .version import __version__


def main(argv: list[str] | None = None) -> int:
    """Runs `tost-hf` with these arguments (by default those of the command line).

    Returns:
        The exit status: 0, or 1 after an error, whose message is on stderr. Wrong usage exits with 2, as argparse does.
    """
    if sys.stdout.errors == "strict":  # its encoding may lack characters of names and labels
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    parser = _make_parser()
    args, unknown_args = parser.parse_known_args(argv)
    options = vars(args)
    run = options.pop("run")
    if run is _serve:
        options["serve_args"] = unknown_args
    elif unknown_args:
        parser.error(f"unrecognized arguments: {' '.join(unknown_args)}")
    try:
        status = run(**options) or 0
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader, such as `head`, has what it wants
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python fails when it flushes at its end
        return 1
    except (ValueError, OSError, ImportError, SafetensorError, StrictDataclassError) as error:
        print(f"tost-hf: error: {error}", file=sys.stderr)
        return 1


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tost-hf",
        description="ToST, the Token Statistics Transformer, for Hugging Face transformers.",
        epilog="'tost-hf COMMAND --help' explains a command. The Hub's token is that of `hf auth login`, or HF_TOKEN.",
    )
    parser.add_argument("--version", action="version", version=f"tost-hf {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add_command(run: Callable, summary: str, *examples: str, parents=()) -> Callable:
        """Adds a subcommand that calls `run`, whose docstring is its description; returns its `add_argument`."""
        name = run.__name__.strip("_")
        command = commands.add_parser(
            name,
            help=summary,
            description=inspect.getdoc(run),
            epilog="examples:\n" + "\n".join(f"  tost-hf {name} {example}" for example in examples),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            parents=list(parents),
        )
        command.set_defaults(run=run)
        return command.add_argument

    model_parser = argparse.ArgumentParser(add_help=False)
    model_parser.add_argument("model", metavar="MODEL", help="a model folder, or a repository of the Hub")
    model_parser.add_argument("--revision", help="branch, tag or commit of the repository (default: main)")
    output_parser = argparse.ArgumentParser(add_help=False, parents=[model_parser])
    output_parser.add_argument("output", metavar="OUT", help="the folder to write")
    output_parser.add_argument("--overwrite", action="store_true", help="write to a folder that is not empty")

    examples = ("tost-base ./my-tost --tokenizer gpt2", "tost-vision-small-patch16 ./my-tost-vision --seed 1")
    add_argument = add_command(_init, "a new model of one of the paper's sizes, with random weights", *examples)
    add_argument("preset", metavar="PRESET", help="tost-base, tost-vision-tiny-patch16, ...")
    add_argument("output", metavar="OUT", help="the folder to write")
    add_argument("--overwrite", action="store_true", help="replace a model that is already at OUT")
    add_argument("--seed", type=int, default=0, help="seed of the weights (default: 0)")
    add_argument("--tokenizer", metavar="FOLDER|REPO_ID", help="tokenizer of a text model, which adopts its special tokens")

    examples = ("out/ckpt.pt ./my-tost", "./my-tost ckpt.pt")
    add_argument = add_command(_convert, "a checkpoint of the authors' code to a transformers folder, or back", *examples)
    add_argument("source", metavar="CHECKPOINT", help="the checkpoint file; or a model folder, to convert back")
    add_argument("output", metavar="OUT", help="the folder to write; or the file, when converting back")
    add_argument("--overwrite", action="store_true", help="replace a model or a file that is already at OUT")
    add_argument("--ema", action="store_true", help="use the EMA weights (model_ema) of a vision checkpoint")
    heads_help = "heads of a softmax baseline, if args.model in the checkpoint is none of the authors' sizes"
    add_argument("--num-attention-heads", type=int, metavar="N", help=heads_help)
    tokens_norm = {"dest": "normalize_patch_tokens", "action": "store_const", "const": False}
    add_argument("--no-normalize-patch-tokens", **tokens_norm, help="trained with tokens_norm=False, unlike released models")

    add_argument = add_command(_card, "write the model card of a folder", "./my-tost --license apache-2.0")
    add_argument("folder", metavar="FOLDER", help="the model folder")
    add_argument("--license", metavar="ID", help="license of the weights, such as apache-2.0")
    add_argument("--repo-id", metavar="REPO_ID", help="where it will be published, for the loading examples")
    add_argument("--revision", help="the tag or commit that the loading examples pin")
    add_argument("--overwrite", action="store_true", help="replace an existing card, text written by hand included")

    examples = ("./my-tost me/my-tost --tag v1 --license apache-2.0", "--space ./my-space me/my-space")
    add_argument = add_command(_publish, "upload a model folder to the Hub, in one commit", *examples)
    add_argument("folder", metavar="FOLDER", help="the model folder, which is not changed")
    add_argument("repo_id", metavar="REPO_ID", help="OWNER/NAME; created if it does not exist")
    add_argument("--private", action="store_true", default=None, help="make a newly created repository private")
    add_argument("--revision", metavar="BRANCH", help="the branch to commit to (default: main), created from main")
    add_argument("--tag", help="a tag for the commit")
    add_argument("--create-pr", action="store_true", help="open a pull request instead of committing to main")
    add_argument("--dry-run", action="store_true", help="list what would be sent and show its card, without sending it")
    add_argument("--license", metavar="ID", help="license of the weights, for a card that names none, or for a new one")
    add_argument("--space", action="store_true", help="FOLDER is a page that `tost-hf space` wrote; publish it as a Space")

    examples = ("me/my-tost --revision v1", "./my-tost")
    add_command(_verify, "check that a folder or a repository is a complete, working model", *examples, parents=[model_parser])
    add_command(_info, "describe the model of a folder or a repository", *examples, parents=[model_parser])

    examples = ("./tost-digits cat.png --out inside", "./tost-demo source.py --out inside")
    add_argument = add_command(_inspect, "plot a model's memberships, compression and entropy", *examples)
    add_argument("model", metavar="MODEL", help="a model folder, or a repository of the Hub")
    add_argument("input", metavar="INPUT", help="an image file, a text file, or a text")
    add_argument("--out", metavar="DIR", required=True, help="the folder to write")
    add_argument("--layers", metavar="N", type=int, nargs="+", help="the layers to plot, counted from 0 as in the weights")
    add_argument("--max-tokens", metavar="N", type=int, help="the tokens of a text to show (default: the first 256)")
    add_argument("--image-size", metavar="N", type=int, help="scale the image to a shorter side of N pixels")
    add_argument("--processor", metavar="ID", help="a tokenizer or image processor, if MODEL has none")
    trust_help = "run the code of a tokenizer or image processor with remote code; by default such code is never run"
    add_argument("--trust-remote-code", action="store_true", help=trust_help)
    add_argument("--overwrite", action="store_true", help="write to a folder that is not empty")

    examples = ("./tost-demo --device cpu --port 8000", "OWNER/NAME --port 8000")
    add_command(_serve, "transformers' OpenAI-compatible server, for one user", *examples)

    examples = ("./tost-demo ./tost-onnx", "me/my-tost ./tost-onnx --dtype float16")
    add_argument = add_command(_export, "export a model to ONNX and compare the outputs", *examples, parents=[output_parser])
    add_argument("--dtype", default="float32", metavar="DTYPE", help="float32 (the default) or float16")
    add_argument("--tokenizer", metavar="FOLDER|REPO_ID", help="the tokenizer to write, if MODEL has none")

    examples = ("./tost-demo", "me/my-tost --port 8080")
    add_argument = add_command(_app, "a page to try a model and to look into it", *examples, parents=[model_parser])
    add_argument("--port", type=int, help="the port (default: 7860, or the next that is free)")

    examples = ("./tost-demo ./tost-space", "me/my-tost ./tost-space --title 'My ToST'")
    add_argument = add_command(_space, "write a Space of the Hub with that page", *examples, parents=[output_parser])
    add_argument("--title", help="the page's title (default: the model's name)")
    return parser


def _init(preset: str, output: str, *, overwrite: bool, seed: int, tokenizer: str | None) -> None:
    """Writes the configuration and randomly initialized float32 weights of a preset.

    With a vision model it writes the image processor, with a text model the tokenizer that --tokenizer names.
    """
    import torch

    import tost_hf

    from .files import check_folder, staged_folder
    from .hub.loading import load_fitting_tokenizer, model_class
    from .image_processing import save_image_processor
    from .model.configuration_tost import PRESETS
    from .model.configuration_tost_vision import VISION_PRESETS

    presets = [*PRESETS, *VISION_PRESETS]
    if preset not in presets:
        raise ValueError(f"There is no preset {preset!r}; choose one of {', '.join(presets)}.")
    check_folder(Path(output), overwrite)
    torch.manual_seed(seed)
    config: Any
    cls: Any
    saved_tokenizer = None
    if preset in VISION_PRESETS:
        if tokenizer is not None:
            raise ValueError(f"{preset} reads images; --tokenizer is for text models.")
        config = tost_hf.ToSTVisionConfig.from_preset(preset, num_labels=1000)
        cls = tost_hf.ToSTForImageClassification
    else:
        config = tost_hf.ToSTConfig.from_preset(preset)
        cls = model_class(config) if config.architectures else tost_hf.ToSTForCausalLM
        if tokenizer is not None:
            saved_tokenizer = load_fitting_tokenizer(tokenizer, config)
            for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
                setattr(config, name, getattr(saved_tokenizer, name))
    with staged_folder(Path(output)) as folder:
        cls(config).save_pretrained(folder)
        if saved_tokenizer is not None:
            saved_tokenizer.save_pretrained(folder)
        if preset in VISION_PRESETS:
            save_image_processor(config, folder)
    print(f"Wrote {output}")


def _convert(source: str, output: str, *, overwrite: bool, **vision_options: Any) -> None:
    """Converts a checkpoint of the authors' code to a folder that from_pretrained loads, or such a folder back to a file.

    A checkpoint is ckpt.pt of a language model, or checkpoint.pth of a vision model or one of its baselines. The type of model
    and its sizes are inferred from the tensors, whose values and dtype stay the same. No code in a checkpoint is run. A
    checkpoint has no tokenizer: the authors' models use GPT-2's.
    """
    from .convert import convert_from_original, convert_to_original

    if not os.path.isdir(source):
        target = convert_from_original(source, output, overwrite=overwrite, **vision_options)
    elif vision_options == {"ema": False, "num_attention_heads": None, "normalize_patch_tokens": None}:
        target = convert_to_original(source, output, overwrite=overwrite)
    else:
        raise ValueError(f"{source} is a folder, which is converted back to a file; the vision options do not apply.")
    print(f"Wrote {target}")


def _card(folder: str, *, overwrite: bool, **options: Any) -> None:
    """Writes README.md from the files of the folder: configuration, weights, results of training and evaluation.

    It leaves out what the files do not state. An existing card is replaced only with --overwrite.
    """
    from .files import check_file
    from .hub.cards import CARD, build_card, save_card

    path = Path(folder, CARD)
    check_file(path, overwrite)
    save_card(build_card(folder, **options), path)
    print(f"Wrote {path}")


def _publish(folder: str, repo_id: str, *, license: str | None, space: bool, dry_run: bool, **options: Any) -> None:
    """Loads a model, checks and saves it again with its tokenizer, card and results, and uploads that in one commit.

    If it is interrupted, the repository is unchanged; run it again. Other files of the folder are not sent. It rejects tokens
    of the Hub, weights with NaN, weights that do not fit config.json, and a card without a license.
    """
    from .hub.publishing import prepare_upload, publish
    from .hub.spaces import check_space, publish_space

    if space:
        private = options.pop("private")
        if license or any(options.values()):
            raise ValueError("--license, --tag, --revision and --create-pr are for models, not for a Space.")
        check_space(folder)
        if dry_run:
            print(f"Dry run: nothing was sent. {folder} would be, all of it.")
        else:
            print(f"Published: {publish_space(folder, repo_id, private=private).commit_url}")
        return
    if dry_run:
        with tempfile.TemporaryDirectory() as temporary:
            files = Path(temporary, "files")
            prepare_upload(folder, files, repo_id, license=license, tag=options["tag"])
            print((files / "README.md").read_text(encoding="utf-8"))
            for path in sorted(filter(Path.is_file, files.rglob("*"))):
                print(f"{path.stat().st_size:14,} bytes  {path.relative_to(files).as_posix()}")
        print("Dry run: nothing was sent. Above are the card and the files that would be.")
        return
    commit = publish(folder, repo_id, license=license, **options)
    print(f"Published: {commit.pr_url or commit.commit_url}")


def _verify(model: str, *, revision: str | None) -> int:
    """Checks the files, configuration, code, card and model of a folder, or of a repository after downloading it.

    The model is loaded and run; the repository's own code is never run. The exit status is 1 if a check fails.
    """
    from .hub.verification import verify

    checks = verify(model, revision=revision)
    for check in checks:
        print(f"{'ok' if check.passed else 'FAILED':8}{check.name:10}{check.detail}")
    num_failed = sum(not check.passed for check in checks)
    print(f"{model}: {num_failed} of {len(checks)} checks failed" if num_failed else f"{model}: all checks passed")
    return int(num_failed > 0)


def _info(model: str, *, revision: str | None) -> None:
    """Prints size, state, positions, license and files, without downloading a repository's weights."""
    from .hub.verification import info

    for name, value in info(model, revision=revision).items():
        print(f"{name:12}{value}")


def _inspect(model: str, input: str, out: str, **options: Any) -> None:
    """Runs a model on one image or text and plots its memberships, class attention, compression, subspaces and entropies.

    It writes PNG files and prints a table of the layers: the mean entropy of the memberships, in nats and as a fraction of
    ln H, the compression term R and the coding rate R_c that it bounds, in nats, with each token or channel at unit norm.
    """
    from .interpret import inspect_path

    table, *pictures = inspect_path(model, input, out, **options)
    print(table.read_text(encoding="utf-8"))
    for path in (table, *pictures):
        print(f"Wrote {path}")


def _serve(serve_args: list[str]) -> None:
    """Runs `transformers serve`, with its options, after registering ToST's classes.

    It handles one request at a time: for more users run `vllm serve MODEL`, where tost-hf is installed.
    """
    import torch
    from huggingface_hub.constants import HF_HUB_CACHE
    from transformers import AutoConfig
    from transformers.utils.import_utils import is_serve_available

    from .extras import install_command
    from .hub.loading import check_model_exists

    if not is_serve_available():
        raise ImportError(f"The server needs more packages: {install_command('serve')}")
    from transformers.cli.transformers import app

    options = app.commands["serve"].make_context("serve", list(serve_args), resilient_parsing=True).params
    if options["force_model"] is not None:  # for a model that does not exist, transformers asks the Hub for two minutes
        name, _, revision = options["force_model"].partition(":")[0].partition("@")
        check_model_exists(name, revision or None)
        if os.path.isdir(name) and AutoConfig.from_pretrained(name).model_type == "tost_vision":
            raise ValueError(f"{name} is a model of images; the server is for models that generate text.")
    if str(options["device"]).startswith("cuda") and not torch.cuda.is_available():
        raise ValueError("PyTorch finds no CUDA device: leave out --device, or give --device cpu.")
    os.makedirs(HF_HUB_CACHE, exist_ok=True)  # without it /v1/models of transformers 5.19 fails
    app(["serve", *serve_args], prog_name="tost-hf")


def _export(model: str, output: str, **options: Any) -> None:
    """Writes the model as an ONNX program, with scripts that run it without this package.

    The state of a sequence is an input and an output: one program is for prefill and decoding. Its outputs are compared with
    the model's; if they differ, nothing is written.
    """
    from .export import export_model

    exported = export_model(model, output, **options)
    print(f"{exported.agreement}\nWrote {exported.folder}")


def _app(model: str, *, revision: str | None, port: int | None) -> None:
    """Opens a page on this machine: classes of an image or text with their scores, or a text as the model writes it, and how
    patches or tokens belong to the heads of each layer.
    """
    from .app import launch_app

    launch_app(model, revision=revision, server_port=port)


def _space(model: str, output: str, **options: Any) -> None:
    """Writes a Gradio Space with the page of `tost-hf app`: the model of a folder, or the name of a repository.

    `pip install -r requirements.txt && python app.py` in the folder shows the page; `tost-hf publish --space OUT OWNER/NAME`
    publishes it.
    """
    from .hub.spaces import write_space

    print(f"Wrote {write_space(model, output, **options)}")


if __name__ == "__main__":
    sys.exit(main())
