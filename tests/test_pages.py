"""The Markdown pages and workflows: their code runs, their commands and options exist, their links resolve."""

import ast
import dataclasses
import inspect
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import cache
from importlib.util import find_spec
from io import StringIO
from itertools import groupby, pairwise
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import yaml
from transformers import AutoConfig

import tost_hf
from tost_hf.cli import main


ROOT = Path(__file__).parents[1]
GUIDES = tuple(sorted(str(path.relative_to(ROOT)) for path in (ROOT / "examples/guides").glob("*.md")))
PAGES = (
    "README.md",
    ".github/CONTRIBUTING.md",
    ".github/CHANGELOG.md",
    "examples/README.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "examples/benchmarks").glob("*.md")),
    "examples/research/lra/README.md",
    "model_cards/README.md",
    *GUIDES,
)
WORKFLOWS = tuple(sorted(str(path.relative_to(ROOT)) for path in (ROOT / ".github/workflows").glob("*.yml")))
# their options are not checked
EXTERNAL_PROGRAMS = set("accelerate bash cd curl export git hf kill lm_eval pre-commit source transformers uv vllm".split())


def read_page(name: str) -> str:
    return (ROOT / name).read_text()


def code_blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", read_page(name), re.DOTALL)


def commands(block: str) -> list[list[str]]:
    """The words of each command of a block, without the variables set for it; lines, `;`, `|` and `&` separate commands."""
    text = re.sub(r"(^|\s)#\s.*$", "", block.replace("\\\n", " "), flags=re.MULTILINE)
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";|&\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
    groups = groupby(lexer, lambda word: set(word) <= set(";|&\n"))
    return [[word for word in words if not re.match("[A-Z_]+=", word)] for is_separator, words in groups if not is_separator]


def workflow_scripts(name: str) -> list[str]:
    """The scripts of a GitHub workflow."""
    jobs = yaml.safe_load(read_page(name))["jobs"].values()
    return [step["run"] for job in jobs for step in job["steps"] if "run" in step]


BLOCKS = {name: code_blocks(name, "bash") for name in PAGES} | {name: workflow_scripts(name) for name in WORKFLOWS}
COMMANDS = [(name, words) for name, blocks in BLOCKS.items() for block in blocks for words in commands(block)]


def ignored_by_git(names: set[str]) -> set[str]:
    """Those of the names in the root of a clone, a folder's with a slash, that git ignores; all where there is no clone."""
    if shutil.which("git") is None:
        return names
    result = subprocess.run(["git", "-C", str(ROOT), "check-ignore", *names], capture_output=True, text=True)
    return names if result.returncode == 128 else set(result.stdout.split())


# Python ---------------------------------------------------------------------------------------------------------------


def missing_libraries(block: str) -> list[str]:
    """Other projects' libraries that a block needs and that are not installed."""
    optional = {"trl": "from trl ", "peft": "from peft ", "bitsandbytes": "BitsAndBytesConfig", "vllm": "from vllm "}
    return [library for library, marker in optional.items() if marker in block and find_spec(library) is None]


def run_blocks(name: str) -> dict:
    """Runs the Python blocks of a page whose libraries are installed, in order, in one namespace."""
    namespace = {}
    for block in code_blocks(name, "python"):
        if not missing_libraries(block):
            exec(compile(block, name, "exec"), namespace)
    return namespace


@pytest.mark.parametrize("name", ["README.md", *GUIDES])
def test_code_runs(name, tmp_path, monkeypatch, capsys):
    """In the root of a clone; no file that it writes there is one of the repository."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("It was a dark night.\n\nThe rain fell in torrents.\n")
    for folder in ("examples", "model_cards"):
        Path(folder).symlink_to(ROOT / folder)
    namespace = run_blocks(name)
    written = {path.name + "/" * path.is_dir() for path in Path().iterdir() if not path.is_symlink()}
    assert ignored_by_git(written) == written
    outputs = re.findall(r"^# (.*)$", "".join(code_blocks(name, "python")), re.MULTILINE)  # a line of comment is an output
    assert set(outputs) <= set(capsys.readouterr().out.splitlines())
    if name == "README.md":
        assert type(namespace["AutoModelForCausalLM"].from_pretrained("tuned-tost")) is tost_hf.ToSTForCausalLM
    elif name.endswith("operator.md"):
        assert namespace["output"].shape == (2, 100, 4, 16)
        torch.testing.assert_close(namespace["membership"].sum(1), torch.ones(2, 100))
    elif name.endswith("publishing.md"):
        assert Path("my-shared-tost/modeling_tost.py").is_file() and type(namespace["again"]) is tost_hf.ToSTForCausalLM


@pytest.mark.parametrize("name", PAGES)
def test_code_block_languages(name):
    languages = re.findall(r"^```(\w*)\n.*?^```$", read_page(name), re.DOTALL | re.MULTILINE)
    assert set(languages) <= {"python", "bash", "bibtex", "text"}


# Commands -------------------------------------------------------------------------------------------------------------


@cache
def script_help(script: str, *subcommand: str) -> str:
    """The output of `python SCRIPT --help`, run in this process because it has imported the libraries already."""
    stdout, folder = StringIO(), str((ROOT / script).parent)
    argv = [script, *subcommand, "--help"]
    patches = patch.object(sys, "argv", argv), patch.object(sys, "path", [folder, *sys.path])
    with patches[0], patches[1], redirect_stdout(stdout), pytest.raises(SystemExit) as exit_info:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    assert not exit_info.value.code, script
    if script == "examples/train_small_images.py":  # it passes other arguments on
        return stdout.getvalue() + script_help("examples/run_image_classification.py")
    return stdout.getvalue()


@cache
def command_help(command: str) -> str:
    stdout = StringIO()
    with redirect_stdout(stdout), pytest.raises(SystemExit) as exit_info:
        main([command, "--help"])
    assert exit_info.value.code == 0
    if command == "serve":  # its options are those of transformers' server
        from transformers.cli.serve import Serve

        server_options = (option.replace("_", "-") for option in inspect.signature(Serve.__init__).parameters)
        return stdout.getvalue() + " ".join("--" + option for option in server_options)
    return stdout.getvalue()


def check_flags(words: list[str], help_text: str) -> None:
    for word in words:
        flag = word.partition("=")[0]
        assert not word.startswith("--") or re.search(rf"(?<![\w-]){flag}(?![\w-])", help_text), f"there is no {flag}"


def check_python(words: list[str]) -> None:
    if words[0] == "-c":
        compile(words[1], "-c", "exec")
    elif words[0] == "-m":
        assert words[1] in ("http.server", "pytest", "venv", "vllm.entrypoints.openai.api_server")
    elif words[0].startswith("./tost-onnx/"):  # which `tost-hf export` writes
        check_flags(words[1:], read_page(f"src/tost_hf/export/{Path(words[0]).name}"))
    else:
        assert (ROOT / words[0]).is_file(), words[0]
        has_subcommands = words[0] == "examples/benchmarks/run.py"
        check_flags(words[1:], script_help(*words[: 1 + has_subcommands]))


def check_make(words: list[str]) -> None:
    for word in words:
        name, is_variable, _ = word.partition("=")
        assert f"\n{name}{' ?=' if is_variable else ':'}" in read_page("Makefile").replace("$(VENV)", ".venv"), word


def check_pip(words: list[str]) -> None:
    extras = tomllib.loads(read_page("pyproject.toml"))["project"]["optional-dependencies"]
    for names in re.findall(r"^\.\[(.*)\]$", words[-1]):
        assert set(names.split(",")) <= extras.keys(), names


def check_tost_hf(words: list[str]) -> None:
    check_flags(words[1:], command_help(words[0]))


CHECKS = {"python": check_python, "make": check_make, "pip": check_pip, "tost-hf": check_tost_hf}


@pytest.mark.parametrize(("name", "words"), COMMANDS, ids=[f"{name}: {' '.join(words)[:50]}" for name, words in COMMANDS])
def test_commands_and_options_exist(name, words):
    program = re.sub(r"^\.venv(-vllm)?/bin/", "", words[0])
    assert program in CHECKS.keys() | EXTERNAL_PROGRAMS, f"{name} names an unknown program: {program}"
    if program in CHECKS:
        CHECKS[program](words[1:])


def test_wrong_commands_are_rejected():
    for words in (
        ["python", "examples/none.py"],
        ["python", "examples/demo.py", "--output-folder", "x"],
        ["python", "examples/benchmarks/run.py", "decode", "--speed", "1"],
        ["tost-hf", "publish", "x", "--licence", "mit"],
        ["tost-hf", "serve", "x", "--doors", "8000"],
        ["make", "coffee"],
        ["make", "compare", "MILK=1"],
        ["pip", "install", "-e", ".[audio]"],
    ):
        with pytest.raises(AssertionError):
            CHECKS[words[0]](words[1:])
    assert commands("a b \\\n  c 'd\ne' # f\n# g\nh & i|j;k") == [["a", "b", "c", "d\ne"], ["h"], ["i"], ["j"], ["k"]]


def test_outputs_are_ignored_by_git():
    outputs = {value for _, words in COMMANDS for option, value in pairwise(words) if option in ("--output_dir", "--out")}
    for _, words in COMMANDS:
        if words[0] == "tost-hf" and words[1] in ("convert", "export", "init", "space"):
            outputs.add([word for word in words[2:] if not word.startswith("--")][1])
    outputs = {output.removeprefix("./").rstrip("/") + "/" * (not Path(output).suffix) for output in outputs}
    assert {"my-ckpt.pt", "tost-onnx/"} <= outputs
    assert ignored_by_git(outputs) == outputs


@pytest.mark.parametrize("name", PAGES)
def test_inline_commands_exist(name):
    """Commands between backticks in prose, such as `make test` and `tost-hf card --presets`."""
    for program, arguments in re.findall(r"`(make|tost-hf) ([^`]+)`", read_page(name)):
        CHECKS[program](re.sub(r" [A-Z]{4,}", "", arguments).split())


# Names and links ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PAGES)
def test_mentioned_files_exist(name):
    for path in re.findall(r"`((?:src|examples|tests|\.github)/[\w./-]+)`", read_page(name)):
        assert (ROOT / path).exists(), path


def sentences_of_string(node: ast.expr) -> Iterator[str]:
    """Regular expressions of the first sentence of a string, the first two, ..., all; spaces stand for any white space."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    texts = [part.value if isinstance(part, ast.Constant) else "\0" for part in parts]
    if all(isinstance(text, str) for text in texts):
        sentences = re.split(r"(?<=\.) ", " ".join(re.sub("%[sd]", "\0", "".join(texts)).split()))
        for i in range(len(sentences)):
            yield re.escape(" ".join(sentences[: i + 1])).replace("\0", "(.+)")


@cache
def message_templates() -> list[re.Pattern]:
    """The strings of the package with at least three words, and those of transformers for an unknown type of model."""
    files = [*(ROOT / "src/tost_hf").rglob("*.py"), Path(inspect.getfile(AutoConfig))]
    nodes = (node for path in files for node in ast.walk(ast.parse(path.read_text())))
    strings = (node for node in nodes if isinstance(node, ast.Constant | ast.JoinedStr))
    templates = {template for node in strings for template in sentences_of_string(node)}
    return [re.compile(template) for template in templates if len(re.findall(r"[a-z]{2,}", template)) > 2]


def occurs_in_source(message: str) -> bool:
    """Whether the source has these sentences; so must it have long formatted parts of them."""
    matches = filter(None, (template.fullmatch(message) for template in message_templates()))
    return any(all(len(part.split()) < 8 or occurs_in_source(part) for part in match.groups()) for match in matches)


QUOTES = re.findall(r"^> (?:[\w.]+: )?(.*)$", read_page("examples/guides/troubleshooting.md"), re.MULTILINE)


@pytest.mark.parametrize("message", [quote for quote in QUOTES if quote != "CUDA out of memory."])  # torch's
def test_quoted_messages_occur_in_source(message):
    assert occurs_in_source(message)


def test_wrong_quotes_are_found():
    for right, wrong in (("shape", "form"), ("numba", "numpy")):  # in a message; in a formatted part of one
        (quote, *_) = (quote for quote in QUOTES if right in quote)
        assert not occurs_in_source(quote.replace(right, wrong, 1))


def anchors(name: str) -> set[str]:
    """The anchors that GitHub generates from the headings of a page."""
    text = re.sub(r"```.*?```", "", read_page(name), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", PAGES)
def test_links_resolve(name):
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)", read_page(name)):
        path = ((ROOT / name).parent / target).resolve() if target else ROOT / name
        assert path.exists(), target
        assert not anchor or anchor in anchors(str(path.relative_to(ROOT))), f"{target}#{anchor}"


@pytest.mark.parametrize("name", ["ToSTConfig", "ToSTVisionConfig", "ToSTTrainingArguments"])
def test_api_pages_show_types_and_defaults(name):
    griffe = pytest.importorskip("griffe")
    extensions = griffe.load_extensions(ROOT / "examples/guides/reference/dataclass_fields.py")
    package = griffe.load("tost_hf", search_paths=[ROOT / "src"], extensions=extensions, docstring_parser="google")
    sections = [x for x in package[name].final_target.docstring.parsed if x.kind is griffe.DocstringSectionKind.parameters]
    parameters = {parameter.name: parameter for section in sections for parameter in section.value}
    fields = {field.name for field in dataclasses.fields(getattr(tost_hf, name))}
    for field in vars(getattr(tost_hf, name))["__annotations__"].keys() & fields:
        if not field.startswith("_"):
            assert parameters[field].annotation is not None and parameters[field].default is not None, field


@pytest.mark.parametrize("name", ["README.md", *GUIDES, *(name for name in PAGES if "benchmarks" in name)])
def test_code_fits_the_site(name):
    lines = "".join(block for language in ("python", "bash", "text") for block in code_blocks(name, language)).splitlines()
    assert [line for line in lines if len(line) > 88] == []


def test_pages_are_short():
    assert len(GUIDES) <= 10
    limits = {"README.md": 140} | dict.fromkeys(GUIDES, 160)
    assert {name: lines for name, limit in limits.items() if (lines := len(read_page(name).splitlines())) > limit} == {}
