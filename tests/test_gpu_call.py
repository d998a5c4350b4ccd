"""The one call for a GPU: its targets, its parts and their shares of the time. Nothing here needs one."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch


BENCHMARKS = Path(__file__).parents[1] / "examples" / "benchmarks"
sys.path.append(str(BENCHMARKS))

import gpu  # noqa: E402
import kernel_cases  # noqa: E402
from records import append_records  # noqa: E402


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_says_that_there_is_none(tmp_path, capsys):
    assert gpu.main(["--results", str(tmp_path)]) == 1
    assert "no GPU" in capsys.readouterr().out


def test_gpu_targets():
    case = {"variant": "triton", "form": "causal", "pass": "forward", "B": "8", "T": "8192", "dtype": "bfloat16"}
    records = {
        "op": [
            case | {"metric": "x roofline", "value": "1.6", "low": "1.4", "high": "1.7"},
            case | {"metric": "reference / this", "value": "12", "low": "11", "high": "13"},
            case | {"variant": "eager", "metric": "reference compiled / this", "value": "9", "low": "9", "high": "9"},
        ],
        "scaling": [
            {"kind": kind, "tokens": "131072", "metric": "exponent", "value": value, "low": value, "high": value}
            for kind, value in (("ToST", "0.9"), ("softmax", "1.0"))
        ],
    }
    verdicts = [verdict for *_, verdict in gpu.compare_with_targets(records)]
    assert verdicts == ["missed", "reached"] + ["not measured"] * 8 + ["missed", "reached"]


def test_gpu_parts_end_in_time(tmp_path, capsys):
    assert not gpu.run_part("slow", ["-c", "import time; time.sleep(600)"], 0.5)
    assert not gpu.run_part("failing", ["-c", "raise SystemExit(3)"], 60)
    assert gpu.run_part("good", ["-c", ""], 60)
    assert gpu.main(["--rehearse", "--minutes", "0", "--results", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "stopped after" in printed and "FAILED with status 3" in printed
    assert printed.count("skipped") == len(gpu.PARTS) and "not measured" in printed and gpu.NOTE in printed


def test_gpu_shares_of_the_time(tmp_path, monkeypatch):
    """The parts' own shares fit; one gets what is left over too, never what later parts are to have."""
    clock = [1000.0]
    started = []

    def run_part(name, arguments, seconds):
        started.append((name, round(seconds)))
        clock[0] += 10
        return True

    monkeypatch.setattr(gpu, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(gpu, "run_part", run_part)
    monkeypatch.setattr(gpu, "print_header", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    total = 60 * gpu.MINUTES
    own = {part.name: part.seconds for part in gpu.PARTS}
    assert sum(own.values()) + gpu.MIN_SECONDS <= total
    assert list(own)[:2] == ["tests", "kernels"]
    assert gpu.main(["--results", str(tmp_path)], started=980) == 0  # 20 seconds were gone before
    expected = [(name, total - 20 - 10 * i - sum(list(own.values())[i + 1 :])) for i, name in enumerate(own)]
    assert started == expected
    assert gpu.time_budget(1, gpu.PARTS, 30) == 30  # too little for all: one after the other


def test_gpu_parts_find_the_package(monkeypatch):
    """Installed or not, and beside what PYTHONPATH names already."""
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    source = str(Path(__file__).parents[1] / "src")
    check = f"import os; assert os.environ['PYTHONPATH'].split(os.pathsep) == [{source!r}, 'elsewhere']"
    assert gpu.run_part("check", ["-c", check + "; assert os.environ['PYTHONUNBUFFERED']"], 60)
    monkeypatch.delenv("PYTHONPATH")
    assert gpu.run_part("check", ["-c", f"import os; assert os.environ['PYTHONPATH'] == {source!r}"], 60)


def test_gpu_tests_exist_and_run_side_by_side_where_they_can():
    files = [name for name in gpu.TESTS if name.startswith("tests/")]
    assert files and all((Path(__file__).parents[1] / name).is_file() for name in files)
    assert ("-n" in gpu.TESTS) is (importlib.util.find_spec("xdist") is not None)


def test_benchmarks_import_without_optional_packages():
    missing = ["datasets", "matplotlib", "accelerate", "evaluate", "PIL", "peft", "sklearn", "kornia", "jinja2", "triton"]
    scripts = "decode, gpu, kernel_times, op, resolution, run, scaling, train_lm"
    code = f"import sys; sys.modules.update(dict.fromkeys({missing})); import {scripts}"
    assert gpu.run_part("import", ["-c", f"import sys; sys.path.append({str(BENCHMARKS)!r}); {code}"], 300)


def test_gpu_reads_the_records_of_this_run_only(tmp_path):
    for day in (1, 2):
        append_records(tmp_path / "op.csv", [{"date": f"2026-01-0{day}T00:00:00+00:00", "value": day}])
    found = gpu.records_since(tmp_path, "2026-01-01T12:00:00+00:00")
    assert [record["value"] for record in found["op"]] == ["2"]


@pytest.mark.parametrize("H, p, T, form", [(3, 16, 1000, "causal"), (12, 64, 65, "bidirectional"), (20, 8, 1, "causal")])
def test_tolerances_hold_for_rounding_and_find_a_token_left_out(H, p, T, form):
    """The reference in float32 stands for correct kernels, and without one token of one sequence for wrong ones."""
    torch.manual_seed(0)
    case = {"causal": form == "causal"}
    leaves = kernel_cases.make(2, T, H, p, **case)
    mask = torch.ones(2, T, dtype=torch.bool)
    for last in (True, False):
        mask[1, T // 2] = last
        out = kernel_cases.run_exact(leaves, mask, **case)
        grads = [torch.randn_like(x) for x in out]
        got = [*out, *torch.autograd.grad(out, list(leaves.values()), grads)]
        wrong = kernel_cases.wrong(kernel_cases.errors(got, leaves, grads, **case))
        assert ("output" in wrong and "gradient of w" in wrong) if not last else not wrong


@pytest.mark.slow
def test_gpu_rehearsal(tmp_path):
    """Every part in its process, as a user starts it."""
    assert gpu.main(["--rehearse", "--minutes", "20", "--repeats", "1", "--results", str(tmp_path)]) == 0
    assert {path.stem for path in tmp_path.glob("*.csv")} == {
        "kernel_times",
        "op",
        "train_lm",
        "decode",
        "scaling",
        "resolution",
    }
