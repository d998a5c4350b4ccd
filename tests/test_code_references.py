"""Every way in which transformers 5.18 to 5.23 is led from a model folder to code is rejected by `publish` and `verify`."""

import json
import re
from pathlib import Path

import pytest
import transformers
from hub_clients import language_folder

from tost_hf.hub.publishing import publish
from tost_hf.hub.verification import verify


EVIL = "evil/repo--module.Evil"
PIPELINE = {"text-generation": {"impl": EVIL, "pt": ["AutoModelForCausalLM"], "type": "text"}}
TOKENIZER, GENERATION = "tokenizer_config.json", "generation_config.json"
PROCESSOR, IMAGES = "processor_config.json", "preprocessor_config.json"
AUDIO = {"audio_tokenizer_class": "AutoModel", "audio_tokenizer_name_or_path": "evil/repo"}
KEYS = [  # (file, what is added to it)
    ("config.json", {"auto_map": {"AutoModelForCausalLM": EVIL}}),
    ("config.json", {"auto_map": {"AutoTokenizer": [None, EVIL]}}),
    ("config.json", {"auto_map": {"AutoConfig": "configuration_tost.Evil"}}),
    ("config.json", {"auto_map": {"AutoConfig": "evil.ToSTConfig"}}),
    (TOKENIZER, {"auto_map": {"AutoTokenizer": [EVIL, EVIL]}}),
    (TOKENIZER, {"auto_map": ["module.Evil", None]}),
    (TOKENIZER, {"auto_map": {"AutoProcessor": "module.Evil"}}),
    (PROCESSOR, {"auto_map": {"AutoProcessor": EVIL}}),
    (PROCESSOR, {"image_processor": {"auto_map": {"AutoImageProcessor": "module.Evil"}}}),
    (IMAGES, {"auto_map": {"AutoImageProcessor": EVIL}}),
    (IMAGES, {"auto_map": {"AutoFeatureExtractor": EVIL}}),
    ("video_preprocessor_config.json", {"auto_map": {"AutoVideoProcessor": EVIL}}),
    (GENERATION, {"auto_map": {"AutoModel": EVIL}}),  # read nowhere today
    ("sub/deep/config.json", {"a": [{"auto_map": {"AutoModel": EVIL}}]}),  # from_pretrained(subfolder=)
    ("config.json", {"custom_pipelines": PIPELINE}),
    ("config.json", {"custom_pipelines": {"text-generation": {"impl": "module.Evil"}}}),
    ("config.json", {"custom_generate": "evil/repo"}),
    (GENERATION, {"custom_generate": "evil/repo"}),
    ("adapter_config.json", {"base_model_name_or_path": "evil/repo", "peft_type": "LORA"}),
    ("config.json", {"_attn_implementation": "evil/kernel"}),
    ("config.json", {"_attn_implementation": {"": "evil/kernel@v1"}}),
    (GENERATION, {"penalty_alpha": 0.6, "top_k": 4}),
    (GENERATION, {"num_beam_groups": 2, "num_beams": 2}),
    (GENERATION, {"dola_layers": "high"}),
    (GENERATION, {"force_words_ids": [[1]]}),
    (GENERATION, {"constraints": [1]}),
    ("config.json", {"task_specific_params": {"text-generation": {"penalty_alpha": 0.6}}}),  # in 5.18
    (PROCESSOR, {"audio_tokenizer": AUDIO}),
    ("config.json", {"a_later_key": [{"b": EVIL}]}),
    (TOKENIZER, {"a_later_key": "repo--module.Evil"}),
]
FILES = ["evil.py", "custom_generate/generate.py", "sub/modeling_tost.py", "evil.pyc", "EVIL.PY"]


LOADERS = {  # of transformers' files: where code of a repository is imported
    "dynamic_module_utils.py",
    "generation/utils.py",
    "pipelines/__init__.py",
    *(
        f"models/auto/{name}.py"
        for name in (
            "auto_factory",
            "configuration_auto",
            "feature_extraction_auto",
            "image_processing_auto",
            "processing_auto",
            "tokenization_auto",
            "video_processing_auto",
        )
    ),
}


def test_transformers_imports_code_nowhere_else():
    """Another file that does is another way to be rejected."""
    root = Path(transformers.__file__).parent
    call = re.compile(r"get_class_from_dynamic_module\(|get_cached_module_file\(")
    paths = [path for path in root.rglob("*.py") if path.parent.parent.name != "models" or path.parent.name == "auto"]
    found = {path.relative_to(root).as_posix() for path in paths if call.search(path.read_text(encoding="utf-8"))}
    assert found == LOADERS


def check_rejected(folder, message):
    with pytest.raises(ValueError, match=message):
        publish(folder, "tost/rejected", dry_run=True)
    checks = {check.name: check for check in verify(folder)}
    failed = checks.get("code", checks["config"])  # a configuration that is rejected itself is not looked at further
    assert not failed.passed and re.search(message, failed.detail), checks
    assert "model" not in checks, "a model that may lead to code was built"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = language_folder(tmp_path_factory.mktemp("model") / "model", with_code=True)
    assert all(check.passed for check in verify(folder)), verify(folder)
    publish(folder, "tost/sound", dry_run=True)
    return folder


@pytest.mark.parametrize(
    ("name", "content"), KEYS, ids=[f"{name}-{next(iter(new))}-{i}" for i, (name, new) in enumerate(KEYS)]
)
def test_keys_that_lead_to_code(model, name, content):
    path = model / name
    before = path.read_bytes() if path.exists() else None
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.write_text(json.dumps(json.loads(before or "{}") | content))
        check_rejected(model, f"{name} leads to code that is not ToST's|code on the Hub, which ToST does not need")
    finally:
        path.unlink() if before is None else path.write_bytes(before)


@pytest.mark.parametrize("name", FILES)
def test_foreign_python_files(model, name):
    path = model / name
    path.parent.mkdir(exist_ok=True)
    try:
        path.write_text("raise SystemExit")
        check_rejected(model, f"{name} is Python code that is not ToST's")
    finally:
        path.unlink()


def test_harmless_values(tmp_path):
    """Vocabularies hold any word, and Trainer's records any command."""
    folder = language_folder(tmp_path / "model")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"] |= {"auto_map": 300, "constraints": 301, "a--b.c": 302}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "run_arguments.json").write_text(json.dumps({"command": "python x.py --a--b.c --auto_map"}))
    generation = json.loads((folder / "generation_config.json").read_text()) | {"num_beam_groups": 1, "penalty_alpha": 0.0}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    publish(folder, "tost/sound", dry_run=True)
    assert all(check.passed for check in verify(folder)), verify(folder)


def test_code_of_an_earlier_version_is_replaced(tmp_path):
    """`publish` sends this version's files in place of those that a folder was saved with, under whatever names."""
    folder = language_folder(tmp_path / "model", with_code=True)
    (folder / "tssa_reference.py").write_text("# as it was")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] |= {"AutoModelForMaskedLM": "modeling_tost_heads.ToSTForMaskedLM"}
    (folder / "config.json").write_text(json.dumps(config))
    publish(folder, "tost/sound", dry_run=True)
    assert "code" in [check.name for check in verify(folder) if not check.passed]


def test_verify_generates_by_its_own_settings(tmp_path):
    """The folder's generation_config.json may ask for any amount of work."""
    folder = language_folder(tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"num_beams": 20000, "max_new_tokens": 10**9}))
    assert all(check.passed for check in verify(folder)), verify(folder)
