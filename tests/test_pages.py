"""The pages of this repository are true: their code runs, their commands and options exist, their links lead somewhere."""

import inspect
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from contextlib import redirect_stdout
from functools import cache
from importlib.util import find_spec
from io import StringIO
from itertools import groupby
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from conftest import auto_processor_missing, randomize, small_config, small_vision_config
from hub_clients import save_tokenizer

import tost_hf
from tost_hf.cli import main
from tost_hf.image_processing import make_image_processor


ROOT = Path(__file__).parents[1]
GUIDES = tuple(sorted(str(path.relative_to(ROOT)) for path in (ROOT / "examples/guides").glob("*.md")))
PAGES = (
    "README.md",
    ".github/CONTRIBUTING.md",
    ".github/CHANGELOG.md",
    "examples/README.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "examples/benchmarks").glob("*.md")),
    "examples/research/lra/README.md",
    "model_cards/trained/README.md",
    *GUIDES,
)
OTHERS = {
    "accelerate",
    "curl",
    "git",
    "kill",
    "lm_eval",
    "pre-commit",
    "transformers",
    "vllm",
}  # other projects' programs, unchecked


def page(name: str) -> str:
    return (ROOT / name).read_text()


def code_blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page(name), re.DOTALL)


def commands(block: str) -> list[list[str]]:
    """The words of every command of a block, without variables set for it: one command per line, `;`, `|` or `&`."""
    text = re.sub(r"(^|\s)#\s.*$", "", block.replace("\\\n", " "), flags=re.MULTILINE)
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";|&\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
    groups = groupby(lexer, lambda word: set(word) <= set(";|&\n"))
    return [[word for word in words if not re.match("[A-Z_]+=", word)] for between, words in groups if not between]


COMMANDS = [(name, words) for name in PAGES for block in code_blocks(name, "bash") for words in commands(block)]


# Python ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def demo_folders(tmp_path, monkeypatch):
    """./tost-demo and ./tost-digits as the pages' commands leave them, but with untrained weights; the trained models."""
    monkeypatch.chdir(tmp_path)
    for name in ("examples", "model_cards"):
        Path(name).symlink_to(ROOT / name)
    save_tokenizer(Path("tost-demo"))
    config = small_config(vocab_size=320, max_position_embeddings=1024, bos_token_id=0, eos_token_id=0)
    randomize(tost_hf.ToSTForCausalLM(config)).save_pretrained("tost-demo")
    config = small_vision_config(patch_size=2, num_labels=10)
    randomize(tost_hf.ToSTForImageClassification(config)).save_pretrained("tost-digits")
    make_image_processor(config).save_pretrained("tost-digits")


def missing_libraries(block: str) -> list[str]:
    """Other projects' libraries that a block needs and that are not installed."""
    optional = {"trl": "from trl ", "peft": "from peft ", "bitsandbytes": "BitsAndBytesConfig", "vllm": "from vllm "}
    optional |= {"openvino": "OpenVINOExporter", "executorch": "ExecutorchExporter"}
    return [library for library, sign in optional.items() if sign in block and find_spec(library) is None]


def run_blocks(name: str) -> dict:
    """Runs every Python block of a page that can run here, in its order, in one namespace."""
    namespace = {}
    for block in code_blocks(name, "python"):
        if not missing_libraries(block) and not (auto_processor_missing and "AutoImageProcessor" in block):
            exec(compile(block, name, "exec"), namespace)
    return namespace


@pytest.mark.parametrize("name", ["README.md", *GUIDES])
def test_code_runs(name, demo_folders):
    if name.endswith("export.md"):  # in a process of its own: transformers' exporters leave patched functions behind
        blocks = [block for block in code_blocks(name, "python") if not missing_libraries(block)]
        subprocess.run([sys.executable, "-c", "\n".join(blocks)], check=True)
        return
    names = run_blocks(name)
    if name == "README.md":
        assert names["config"].num_hidden_layers == 2 and names["scratch"].config.max_position_embeddings is None
    elif name.endswith("generation.md"):
        assert names["output"].shape == (2, 100, 4, 16)
        torch.testing.assert_close(names["membership"].sum(1), torch.ones(2, 100))
        assert Path("document.safetensors").is_file()
    elif name.endswith("publishing.md"):
        assert Path("shared/modeling_tost.py").is_file() and type(names["again"]) is tost_hf.ToSTForCausalLM


@pytest.mark.parametrize("name", PAGES)
def test_blocks_have_a_language_that_is_tested(name):
    languages = re.findall(r"^```(\w*)\n.*?^```$", page(name), re.DOTALL | re.MULTILINE)
    assert set(languages) <= {"python", "bash", "bibtex", "text"}


# Commands -------------------------------------------------------------------------------------------------------------


@cache
def help_of(script: str, *subcommand: str) -> str:
    """What `python SCRIPT --help` prints, run in this process, which has the libraries imported already."""
    shown, folder = StringIO(), str((ROOT / script).parent)
    argv = [script, *subcommand, "--help"]
    as_started = patch.object(sys, "argv", argv), patch.object(sys, "path", [folder, *sys.path])
    with as_started[0], as_started[1], redirect_stdout(shown), pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    assert not end.value.code, script
    return shown.getvalue()


@cache
def help_of_command(command: str) -> str:
    shown = StringIO()
    with redirect_stdout(shown), pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    if command == "serve":  # its options are those of transformers' server
        from transformers.cli.serve import Serve

        own = (option.replace("_", "-") for option in inspect.signature(Serve.__init__).parameters)
        return shown.getvalue() + " ".join("--" + option for option in own)
    return shown.getvalue()


def check_flags(words: list[str], known: str) -> None:
    for word in words:
        flag = word.partition("=")[0]
        assert not word.startswith("--") or re.search(rf"(?<![\w-]){flag}(?![\w-])", known), f"there is no {flag}"


def check_python(words: list[str]) -> None:
    if words[0] == "-c":
        compile(words[1], "-c", "exec")
    elif words[0] == "-m":
        assert words[1] in ("http.server", "pytest", "venv", "vllm.entrypoints.openai.api_server")
    else:
        assert (ROOT / words[0]).is_file(), words[0]
        has_subcommands = words[0] == "examples/benchmarks/run.py"
        check_flags(words[1:], help_of(*words[: 1 + has_subcommands]))


def check_make(words: list[str]) -> None:
    for target in words:
        assert f"\n{target}:" in page("Makefile"), target


def check_pip(words: list[str]) -> None:
    extras = tomllib.loads(page("pyproject.toml"))["project"]["optional-dependencies"]
    for named in re.findall(r"^\.\[(.*)\]$", words[-1]):
        assert named in extras, named


def check_tost_hf(words: list[str]) -> None:
    check_flags(words[1:], help_of_command(words[0]))


CHECKS = {"python": check_python, "make": check_make, "pip": check_pip, "tost-hf": check_tost_hf}


@pytest.mark.parametrize(("name", "words"), COMMANDS, ids=[f"{name}: {' '.join(words)[:50]}" for name, words in COMMANDS])
def test_commands_and_their_options_exist(name, words):
    program = re.sub(r"^\.venv(-vllm)?/bin/", "", words[0])
    assert program in CHECKS.keys() | OTHERS, f"{name} names an unknown program: {program}"
    if program in CHECKS:
        CHECKS[program](words[1:])


def test_a_wrong_command_is_found():
    for words in (
        ["python", "examples/none.py"],
        ["python", "examples/demo.py", "--output-folder", "x"],
        ["python", "examples/benchmarks/run.py", "decode", "--speed", "1"],
        ["tost-hf", "publish", "x", "--licence", "mit"],
        ["tost-hf", "serve", "x", "--doors", "8000"],
        ["make", "coffee"],
        ["pip", "install", "-e", ".[audio]"],
    ):
        with pytest.raises(AssertionError):
            CHECKS[words[0]](words[1:])
    assert commands("a b \\\n  c 'd\ne' # f\n# g\nh & i|j;k") == [["a", "b", "c", "d\ne"], ["h"], ["i"], ["j"], ["k"]]


@pytest.mark.parametrize("name", PAGES)
def test_commands_in_the_text_exist(name):
    """Between backticks in running text: `make test`, `tost-hf card --presets`."""
    for program, rest in re.findall(r"`(make|tost-hf) ([^`]+)`", page(name)):
        CHECKS[program](re.sub(r"[A-Z]{4,}", "", rest).split())


# Names and links ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PAGES)
def test_named_files_exist(name):
    for path in re.findall(r"`((?:src|examples|tests|\.github)/[\w./-]+)`", page(name)):
        assert (ROOT / path).exists(), path


def anchors(name: str) -> set[str]:
    """As GitHub makes them of headings."""
    text = re.sub(r"```.*?```", "", page(name), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)", page(name)):
        path = ((ROOT / name).parent / target).resolve() if target else ROOT / name
        assert path.exists(), target
        assert not anchor or anchor in anchors(str(path.relative_to(ROOT))), f"{target}#{anchor}"


def test_the_linter_has_one_version():
    (pinned,) = re.findall(r"^ruff==(.*)$", page("tests/constraints.txt"), re.MULTILINE)
    assert f"rev: v{pinned}\n" in page(".pre-commit-config.yaml")


def test_readme_and_guides_are_short():
    assert {name: lines for name in ("README.md", *GUIDES) if (lines := len(page(name).splitlines())) > 150} == {}
