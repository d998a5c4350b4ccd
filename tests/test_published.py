"""One published repository through everything that a user of transformers puts it to, without the package and without special
arguments but `trust_remote_code`: pipelines, PEFT, lm-evaluation-harness."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import needs_auto_processor
from hub_clients import Clients, language_folder, save_tokenizer, vision_folder
from safetensors.torch import load_file
from test_remote_code import classifier_folder, without_package  # noqa: F401  (a fixture)


@pytest.fixture(scope="module")
def strangers(hub, tmp_path_factory, without_package):  # noqa: F811
    """Processes without the package, and the repositories they use: tost/causal, tost/reviews, tost/images."""
    folder = tmp_path_factory.mktemp("models")
    language_folder(folder / "causal")
    classifier_folder(folder / "reviews")
    save_tokenizer(folder / "reviews")
    vision_folder(folder / "images")
    with Clients(hub, tmp_path_factory.mktemp("clients")) as clients:
        for name in ("causal", "reviews", "images"):
            clients.command("publish", folder / name, f"tost/{name}", token=hub.token("writer")).check()
    with Clients(hub, tmp_path_factory.mktemp("strangers"), **without_package) as forks:
        yield forks


TEXT_GENERATION = """
from transformers import TextStreamer, pipeline
writer = pipeline("text-generation", model="tost/causal", trust_remote_code=True)
assert type(writer.model).__module__.startswith("transformers_modules")
writer.tokenizer.pad_token = writer.tokenizer.eos_token
writer.tokenizer.padding_side = "left"
prompts = ["import os", "x", "def f(a, b):"]
options = {"max_new_tokens": 6, "do_sample": False, "return_full_text": False}
alone = [writer(prompt, **options)[0]["generated_text"] for prompt in prompts]
batched = [answers[0]["generated_text"] for answers in writer(prompts, batch_size=3, **options)]
assert alone == batched, (alone, batched)
writer("import os", streamer=TextStreamer(writer.tokenizer, skip_prompt=True), **options)
try:
    writer([{"role": "user", "content": "hello"}], **options)
except ValueError as error:
    assert "chat_template" in str(error)
else:
    raise AssertionError("a chat without a template went through")
"""


def test_text_generation(strangers):
    """Batches with left padding equal single prompts; streaming; a chat without a template is rejected with a message."""
    strangers.run(TEXT_GENERATION).check()


CLASSIFICATION = """
from transformers import pipeline
reviewer = pipeline("text-classification", model="tost/reviews", trust_remote_code=True)
reviewer.tokenizer.pad_token = reviewer.tokenizer.eos_token
texts = ["good", "a long and rather bad one"]
alone = [reviewer(text, top_k=None) for text in texts]
batched = reviewer(texts, batch_size=2, top_k=None)
for one, other in zip(alone, batched):
    for left, right in zip(one, other):
        assert left["label"] == right["label"] and abs(left["score"] - right["score"]) < 1e-5
assert len(alone[0]) == 3
"""


def test_text_classification(strangers):
    strangers.run(CLASSIFICATION).check()


IMAGES = """
from PIL import Image
from transformers import pipeline
picture = Image.linear_gradient("L").convert("RGB")
labels = pipeline("image-classification", model="tost/images", trust_remote_code=True)([picture, picture], top_k=3)
assert len(labels) == 2 and len(labels[0]) == 3 and labels[0] == labels[1]
features = pipeline("image-feature-extraction", model="tost/images", trust_remote_code=True)(picture)
assert len(features[0][0]) == 32 and len(features[0]) in (64, 65)
"""


@needs_auto_processor
def test_images(strangers):
    """Classes of pictures, and a vector for each patch."""
    strangers.run(IMAGES).check()


ADAPTER = """
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
torch.manual_seed(0)
model = AutoModelForCausalLM.from_pretrained("tost/causal", trust_remote_code=True)
model = get_peft_model(model, LoraConfig(target_modules=["in_proj", "out_proj"], r=4, task_type="CAUSAL_LM"))
tokens = torch.arange(1, 25).reshape(2, 12)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
losses = []
for _ in range(20):
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[-1] < 0.8 * losses[0], losses
model.eval().push_to_hub("tost/adapter")
save_file({"logits": model(tokens).logits.detach()}, argv[0])
"""
ON_TOP = """
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
tokens = torch.arange(1, 25).reshape(2, 12)
base = AutoModelForCausalLM.from_pretrained("tost/causal", trust_remote_code=True)
before = base.eval()(tokens).logits.detach().clone()
model = PeftModel.from_pretrained(base, "tost/adapter").eval()
save_file({"logits": model(tokens).logits.detach(), "before": before}, argv[0])
model.generate(input_ids=tokens, max_new_tokens=3)
"""


def test_peft_adapter(hub, strangers, tmp_path):
    """LoRA on the published model learns, is pushed as an adapter, and another process loads it on top."""
    strangers.run(ADAPTER, tmp_path / "trained", token=hub.token("writer")).check()
    pushed = set(hub.files("tost/adapter"))
    assert {"adapter_config.json", "adapter_model.safetensors"} <= pushed
    assert not any(name.endswith((".bin", ".pt")) for name in pushed)
    strangers.run(ON_TOP, tmp_path / "loaded").check()
    loaded = load_file(tmp_path / "loaded")
    assert torch.equal(load_file(tmp_path / "trained")["logits"], loaded["logits"])
    assert not torch.allclose(loaded["logits"], loaded["before"], atol=1e-2)


@pytest.mark.slow
@pytest.mark.usefixtures("strangers")  # who publish the model
def test_lm_eval(hub, without_package, tmp_path):  # noqa: F811
    """The harness's own command line, on a task of this repository, without the package."""
    command = [sys.executable, *without_package["options"], "-m", "lm_eval", "--model", "hf"]
    command += ["--model_args", "pretrained=tost/causal,trust_remote_code=True", "--tasks", "tost_texts"]
    command += ["--include_path", "tests/fixtures/evaluation", "--device", "cpu", "--output_path", str(tmp_path / "out")]
    options = {"PYTHONPATH": without_package["PYTHONPATH"], "DISABLE_MULTIPROC": "1"}  # one process for standard errors
    environment = hub.environment(tmp_path / "home", **options)
    done = subprocess.run(
        command,
        env=environment,
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    results = json.loads(next((tmp_path / "out").rglob("results*.json")).read_text())["results"]["tost_texts"]
    perplexity = results["byte_perplexity,none"]
    assert 1 < perplexity < 10_000
    assert os.path.isdir(tmp_path / "home/modules/transformers_modules")  # it ran the remote code
