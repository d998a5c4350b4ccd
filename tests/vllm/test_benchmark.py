"""`run.py vllm` measures a model in a server of its own."""

import csv

from run import main


def test_run(tmp_path, monkeypatch):
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING")  # of conftest.py; the server has processes of its own
    options = ("--models", "ToST conv token", "--prompts", "20", "--clients", "1", "3", "--tokens", "4", "--repeats", "1")
    assert main(["vllm", *options, "--results", str(tmp_path)]) == 0
    with open(tmp_path / "vllm.csv", newline="") as file:
        values = {(row["clients"], row["metric"]): float(row["value"]) for row in csv.DictReader(file)}
    metrics = ("tokens/s", "first token, ms", "bytes a sequence", "sequences in 1 GiB")
    assert set(values) == {(clients, metric) for clients in "13" for metric in metrics}
    assert values["3", "first token, ms"] > 0 and 10_000 < values["1", "bytes a sequence"] < 1_000_000
