"""Every way in which transformers is led from a model folder to code is rejected by `publish` and `verify`.

The ways were read in transformers 5.23.0 and 5.18.0; `READ_AT` names the lines of both (paths below `transformers/`).
"""

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
READ_AT = {  # the key: the places that read it in 5.23.0 | in 5.18.0
    "auto_map of config.json": (
        "models/auto/configuration_auto.py:406, auto_factory.py:207,358, tokenizer, processors: see below | "
        "configuration_auto.py:398, auto_factory.py:212,362"
    ),
    "auto_map of tokenizer_config.json": (
        "models/auto/tokenization_auto.py:823-828, processing_auto.py:300 | tokenization_auto.py:822, processing_auto.py:296"
    ),
    "auto_map of processor_config.json": "models/auto/processing_auto.py:251 | processing_auto.py:247",
    "auto_map of preprocessor_config.json": (
        "models/auto/image_processing_auto.py:639,647, feature_extraction_auto.py:332, processing_auto.py:262,287 | "
        "image_processing_auto.py:634,642, feature_extraction_auto.py:328, processing_auto.py:258,283"
    ),
    "auto_map of video_preprocessor_config.json": (
        "models/auto/video_processing_auto.py:367,381, processing_auto.py:275 | video_processing_auto.py:333,347"
    ),
    "custom_pipelines": "pipelines/__init__.py:1032-1064 | pipelines/__init__.py:938-968",
    "custom_generate": "generation/utils.py:580,616,651 | generation/utils.py:571,642",
    "adapter": "models/auto/auto_factory.py:296-313, pipelines/__init__.py:998-1014 | auto_factory.py:321, __init__.py:923",
    "attention": "modeling_utils.py:1802, integrations/hub_kernels.py:844-869 | modeling_utils.py:1267,3743",
    "generation modes": "generation/utils.py:143-154,2796 | generation/utils.py:141,2508",
    "audio tokenizer": "processing_utils.py:1524-1535 | processing_utils.py:1464",
    "reference": "dynamic_module_utils.py:605 (split at two hyphens) | dynamic_module_utils.py:602",
}
TOKENIZER, GENERATION = "tokenizer_config.json", "generation_config.json"
KEYS = [  # (the key of READ_AT, file, what is added to it)
    ("auto_map of config.json", "config.json", {"auto_map": {"AutoModelForCausalLM": EVIL}}),
    ("auto_map of config.json", "config.json", {"auto_map": {"AutoTokenizer": [None, EVIL]}}),
    ("auto_map of config.json", "config.json", {"auto_map": {"AutoConfig": "configuration_tost.Evil"}}),
    ("auto_map of config.json", "config.json", {"auto_map": {"AutoConfig": "evil.ToSTConfig"}}),
    ("auto_map of tokenizer_config.json", TOKENIZER, {"auto_map": {"AutoTokenizer": [EVIL, EVIL]}}),
    ("auto_map of tokenizer_config.json", TOKENIZER, {"auto_map": ["module.Evil", None]}),
    ("auto_map of tokenizer_config.json", TOKENIZER, {"auto_map": {"AutoProcessor": "module.Evil"}}),
    ("auto_map of processor_config.json", "processor_config.json", {"auto_map": {"AutoProcessor": EVIL}}),
    (
        "auto_map of processor_config.json",
        "processor_config.json",
        {"image_processor": {"auto_map": {"AutoImageProcessor": "module.Evil"}}},
    ),
    ("auto_map of preprocessor_config.json", "preprocessor_config.json", {"auto_map": {"AutoImageProcessor": EVIL}}),
    ("auto_map of preprocessor_config.json", "preprocessor_config.json", {"auto_map": {"AutoFeatureExtractor": EVIL}}),
    (
        "auto_map of video_preprocessor_config.json",
        "video_preprocessor_config.json",
        {"auto_map": {"AutoVideoProcessor": EVIL}},
    ),
    ("auto_map of config.json", GENERATION, {"auto_map": {"AutoModel": EVIL}}),  # read nowhere today
    (
        "auto_map of config.json",
        "sub/deep/config.json",
        {"a": [{"auto_map": {"AutoModel": EVIL}}]},
    ),  # from_pretrained(subfolder=)
    ("custom_pipelines", "config.json", {"custom_pipelines": PIPELINE}),
    ("custom_pipelines", "config.json", {"custom_pipelines": {"text-generation": {"impl": "module.Evil"}}}),
    ("custom_generate", "config.json", {"custom_generate": "evil/repo"}),
    ("custom_generate", GENERATION, {"custom_generate": "evil/repo"}),
    ("adapter", "adapter_config.json", {"base_model_name_or_path": "evil/repo", "peft_type": "LORA"}),
    ("attention", "config.json", {"_attn_implementation": "evil/kernel"}),
    ("attention", "config.json", {"_attn_implementation": {"": "evil/kernel@v1"}}),
    ("generation modes", GENERATION, {"penalty_alpha": 0.6, "top_k": 4}),
    ("generation modes", GENERATION, {"num_beam_groups": 2, "num_beams": 2}),
    ("generation modes", GENERATION, {"dola_layers": "high"}),
    ("generation modes", GENERATION, {"force_words_ids": [[1]]}),
    ("generation modes", GENERATION, {"constraints": [1]}),
    ("generation modes", "config.json", {"task_specific_params": {"text-generation": {"penalty_alpha": 0.6}}}),  # in 5.18
    (
        "audio tokenizer",
        "processor_config.json",
        {"audio_tokenizer": {"audio_tokenizer_class": "AutoModel", "audio_tokenizer_name_or_path": "evil/repo"}},
    ),
    ("reference", "config.json", {"a_later_key": [{"b": EVIL}]}),
    ("reference", TOKENIZER, {"a_later_key": "repo--module.Evil"}),
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
    ("key", "name", "content"), KEYS, ids=[f"{name}-{next(iter(new))}-{i}" for i, (_, name, new) in enumerate(KEYS)]
)
def test_keys_that_lead_to_code(model, key, name, content):
    assert key in READ_AT
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


def test_words_that_only_look_like_it(tmp_path):
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
