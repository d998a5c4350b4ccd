"""Helpers of the tests of the Hub: small model folders that can be published, and processes that use a Hub."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import randomize, small_config, small_vision_config
from hub_server import Hub
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, pipeline

import tost_hf
from tost_hf.image_processing import make_image_processor


CARD = "---\nlicense: apache-2.0\n---\n\nA model for tests.\n"

# Imports once, then forks for each request, because the imports take seconds.
WORKER = """
import gc, json, os, signal, sys, traceback
import torch, transformers
from transformers import AutoImageProcessor, AutoTokenizer, GenerationMixin, PreTrainedTokenizerFast, pipeline  # slow imports
{preload}
gc.freeze()  # or each run of Trainer would look for garbage in all that is imported
for line in sys.stdin:
    request = json.loads(line)
    if "wait" in request:
        print(os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1]), flush=True)
        continue
    child = os.fork()
    if child:
        print(child, flush=True)
        continue
    signal.alarm(300)  # ends a request that hangs
    os.environ.update(request["environment"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    status = 1
    try:
        exec(compile(request["code"], "<test>", "exec"), globals() | {{"argv": request["argv"]}})
        status = 0
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
"""

# argv: auto class, name or folder, options of from_pretrained, file for the results
COMPUTE = """
import json
from safetensors.torch import save_file
auto_class, source, options, output = argv
torch.set_num_threads(1)
model = getattr(transformers, auto_class).from_pretrained(source, **json.loads(options)).eval()
with torch.no_grad():
    if model.config.model_type == "tost":
        tokens = torch.arange(1, 13).reshape(2, 6)
        results = dict(model(tokens).items())
        if model.can_generate():
            results["generated"] = model.generate(tokens, max_new_tokens=5, do_sample=False)
    else:
        results = dict(model(torch.linspace(-1, 1, 2 * 3 * 256).reshape(2, 3, 16, 16)).items())
        results |= {f"map {i}": x for i, x in enumerate(results.pop("feature_maps", ()))}
save_file({name: x.contiguous() for name, x in results.items() if isinstance(x, torch.Tensor)}, output)
"""


@dataclass
class Client:
    """A process that runs in the background or has ended."""

    pid: int
    log: Path
    status: int | None = None

    @property
    def output(self) -> str:
        """Its stdout and stderr."""
        return self.log.read_text()

    def check(self) -> "Client":
        """Asserts that it succeeded; shows the output otherwise."""
        assert self.status == 0, self.output
        return self


class Clients:
    """Processes that use a Hub, forked from one that has done the imports. Their HF_HOME is `folder / "home"`."""

    def __init__(self, hub: Hub, folder: Path, preload: str = "", options: tuple[str, ...] = (), **environment: str):
        self.hub, self.folder, self.number = hub, folder, 0
        self.worker = subprocess.Popen(
            [sys.executable, *options, "-c", WORKER.format(preload=preload)],
            env=hub.environment(folder / "home", **environment),
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> "Clients":
        return self

    def __exit__(self, *error) -> None:
        self.worker.kill()
        self.worker.communicate()

    def _ask(self, **request) -> int:
        print(json.dumps(request), file=self.worker.stdin, flush=True)
        return int(self.worker.stdout.readline())

    def start(self, code: str, *argv, token: str | None = None, **environment: str) -> Client:
        """Starts code, in which `argv` is the list of arguments as strings, without waiting for its end."""
        self.number += 1
        log = self.folder / f"{self.number}.log"
        environment |= {"HF_TOKEN": token} if token else {}
        pid = self._ask(code=code, argv=[str(argument) for argument in argv], environment=environment, log=str(log))
        return Client(pid, log)

    def wait(self, client: Client) -> Client:
        client.status = self._ask(wait=client.pid)
        return client

    def run(self, code: str, *argv, token: str | None = None, **environment: str) -> Client:
        return self.wait(self.start(code, *argv, token=token, **environment))

    def command(self, *argv, token: str | None = None) -> Client:
        """Runs `tost-hf` with these arguments."""
        return self.run("raise SystemExit(tost_hf.cli.main(argv))", *argv, token=token)

    def publish(self, *argv) -> Client:
        """Runs `tost-hf publish` as the Hub's user, successfully."""
        return self.command("publish", *argv, token=self.hub.token).check()

    def load(
        self, source, auto_class: str = "AutoModelForCausalLM", backend: str = "auto", **options
    ) -> Client | dict[str, torch.Tensor]:
        """Loads a model in another process; returns its outputs or, if it cannot be loaded, the process.

        The cache is new, because an old one would answer requests that the Hub rejects. "torch" compiles no kernels.
        """
        options["cache_dir"] = str(self.folder / f"cache-{self.number}")
        output = self.folder / f"results-{self.number}.safetensors"
        client = self.run(COMPUTE, auto_class, source, json.dumps(options), output, TOST_HF_BACKEND=backend)
        return load_file(output) if client.status == 0 else client


@pytest.fixture(scope="session")
def clients(hub, tmp_path_factory) -> Iterator[Clients]:
    """Client processes with the package."""
    preload = "import datasets, tost_hf.cli, tost_hf.hub.publishing, tost_hf.hub.verification; tost_hf.ToSTTrainer"
    with Clients(hub, tmp_path_factory.mktemp("clients"), preload) as clients:
        yield clients


def equal_outputs(actual: Client | dict, expected: Client | dict) -> bool:
    """Whether two models' outputs are bitwise equal; fails with the client's log if one could not be loaded."""
    for outputs in (actual, expected):
        assert isinstance(outputs, dict), outputs.output
    return actual.keys() == expected.keys() and all(torch.equal(actual[name], expected[name]) for name in actual)


def save_tokenizer(folder: Path) -> None:
    """Saves a byte-level tokenizer of at most 320 tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(["<|endoftext|>", *alphabet])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(folder)


def language_model(seed: int = 0, model_class=tost_hf.ToSTForCausalLM, **config) -> tost_hf.ToSTPreTrainedModel:
    """A small language model; those of two seeds differ in every weight."""
    fields = {"vocab_size": 320, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 0}
    model = randomize(model_class(small_config(**(fields | config))))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + seed / 8)
    return model.eval()


def save_with_card(model: tost_hf.ToSTPreTrainedModel, folder: Path, **save) -> Path:
    model.save_pretrained(folder, **save)
    (folder / "README.md").write_text(CARD)
    return folder


def language_folder(folder: Path, seed: int = 0, **save) -> Path:
    """Writes a folder that can be published: model, tokenizer, card."""
    save_with_card(language_model(seed), folder, **save)
    save_tokenizer(folder)
    return folder


def vision_folder(folder: Path) -> Path:
    config = small_vision_config(patch_size=2, num_labels=10)
    save_with_card(randomize(tost_hf.ToSTForImageClassification(config)), folder)
    make_image_processor(config).save_pretrained(folder)
    return folder


def image_folder(folder: Path, processor_file: str | None = None, **changes) -> tuple:
    """Saves an image classifier and returns it with its processor, which has unusual settings if that has a file."""
    config = small_vision_config(**({"num_hidden_layers": 1, "id2label": {0: "cat", 1: "dog", 2: "птица"}} | changes))
    model, processor = randomize(tost_hf.ToSTForImageClassification(config)).eval(), make_image_processor(config)
    model.save_pretrained(folder)
    if processor_file:
        processor = make_image_processor(config, crop="squash")
        processor.image_mean = [0.3, 0.4, 0.5]
        settings = {"image_processor": processor.to_dict()}
        content = settings if processor_file == "processor_config.json" else settings["image_processor"]
        (folder / processor_file).write_text(json.dumps(content))
    return model, processor


def image_pipeline(model, processor):
    """The classifier of transformers; for one channel with gray images, which it would convert to RGB."""
    classifier = pipeline("image-classification", model, image_processor=processor)
    if model.config.num_channels == 1:
        classifier.image_processor = lambda images, **options: processor(images.convert("L"), **options)
    return classifier


def save_picture(path: Path, mode: str = "RGB") -> str:
    """Saves noise as phones save a photograph: rotated, with an orientation in its EXIF data. 30 x 40 pixels, upright."""
    from PIL import ExifTags, Image

    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 30, 3), np.uint8)).convert(mode)
    picture.rotate(90, expand=True).save(path, exif=exif)
    return str(path)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
