"""What the training scripts show: quiet by default, with the results at the end."""

import re

import pytest
from image_runs import tiny_vision_model
from scripts import EXAMPLES, launch
from text_runs import TINY

from tost_hf.image_processing import make_image_processor


NOISE = re.compile(r"warn|deprecat|missing|mismatch|config {|\[transformers]", re.IGNORECASE)


@pytest.mark.slow
def test_output_of_a_language_model(tmp_path, clm_args):
    """Quiet, also when it resumes; --log_level brings transformers' messages back."""
    overrides = {"config_overrides": f"{TINY},tie_word_embeddings=true", "logging_steps": None}
    args = clm_args(do_eval=True, max_steps=20, save_strategy="steps", save_steps=10, **overrides)
    script = EXAMPLES / "run_clm.py"
    lines = launch(script, tmp_path, args, processes=1, stderr=True).splitlines()
    text = "\n".join(lines)
    assert not NOISE.search(text), text
    folder = tmp_path / "out"
    assert lines[0].startswith("Model: new, of the type tost; ") and lines[0].endswith(" parameters, float32, on cpu")
    assert lines[1].startswith(f"Data: {tmp_path}") or "train.txt; blocks of 32 tokens: " in lines[1]
    assert re.findall(r"step (\d+): (?=loss)", text) == ["10", "20"]
    assert re.findall(r"step (\d+): (?=held out: loss)", text)[0] == "0"
    before, after = map(float, re.search(r"\nloss +(\S+) +(\S+)\n", text).groups())
    assert after < before < 10
    assert f"The model and its card are in {folder}." in text and not (folder / "curves.png").exists()  # of two points
    assert f"tost-hf publish {folder} OWNER/NAME --license apache-2.0" in text

    args[args.index("--max_steps") + 1] = "30"
    text = launch(script, tmp_path, args, processes=1, stderr=True)
    assert "Resuming from" in text and not NOISE.search(text), text
    assert f"from step 20 on. The model, its card and curves.png are in {folder}." in text
    assert (folder / "curves.png").stat().st_size > 1000
    assert float(re.search(r"\nloss +(\S+) +\S+\n", text)[1]) == before  # of the interrupted run
    args[args.index("--max_steps") + 1] = "31"
    assert "[transformers]" in launch(script, tmp_path, [*args, "--log_level", "info"], processes=1, stderr=True)


@pytest.mark.slow
def test_output_of_an_image_classifier(tmp_path, image_args):
    """With labels other than the model's."""
    model = tiny_vision_model()
    model.save_pretrained(tmp_path / "model")
    make_image_processor(model.config).save_pretrained(tmp_path / "model")
    changes = {"config_name": None, "config_overrides": None, "model_name_or_path": tmp_path / "model", "disable_tqdm": None}
    args = image_args("image_finetuning", **changes, do_eval=True)
    text = launch(EXAMPLES / "run_image_classification.py", tmp_path, args, processes=1, stderr=True)
    assert not NOISE.search(text), text
    assert "The model's labels are LABEL_0, LABEL_1, LABEL_2, the data's one, two, zero: its classifier is replaced" in text
    assert re.search(r"\naccuracy +\d+\.\d % +\d+\.\d %\n", text)
    assert f"tost-hf inspect {tmp_path / 'out'} PHOTO.jpg --out inside" in text
