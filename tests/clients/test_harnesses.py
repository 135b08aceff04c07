"""lm-eval and Inspect against a served deployment, by the commands of docs/evaluation.md.

``HEARTH_HARNESSES`` names the folder of the programs, such as ``make .venv-harnesses/.installed``
makes.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from tests.documents.blocks import read_blocks
from tests.integration.served import Served

from hearth.sdk import DeploymentConfig, DeploymentManager
from training.data.rows import load_rows
from training.quickstart import HELDOUT_ROWS, MODEL

PROGRAMS = os.environ.get("HEARTH_HARNESSES", "")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "evaluation.md"
ROWS = 8
SUMS = """
task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/sums.jsonl}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n"], do_sample: false, max_gen_toks: 16}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
filter_list:
  - name: answer
    filter: [{{function: regex, regex_pattern: "<answer>(.*?)</answer>"}}, {{function: take_first}}]
"""
CHOICES = ("<answer>5</answer>", "<answer>77</answer>", "<answer>140</answer>")
CHOICE = """
task: choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/sums.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
target_delimiter: ""
doc_to_choice: {choices}
doc_to_target: 1
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
TASK = """
from inspect_ai import Task, task
from inspect_ai.dataset import FieldSpec, json_dataset
from inspect_ai.scorer import pattern
from inspect_ai.solver import generate


@task
def sums():
    return Task(
        dataset=json_dataset("sums.jsonl", FieldSpec(input="question", target="answer")),
        solver=generate(),
        scorer=pattern("<answer>(.*?)</answer>"),
    )
"""

if not PROGRAMS:
    pytest.skip("needs HEARTH_HARNESSES, lm-eval and Inspect", allow_module_level=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The tasks of both harnesses, on rows of the shipped model."""
    folder = tmp_path_factory.mktemp("harnesses")
    rows = load_rows(str(HELDOUT_ROWS), ROWS)
    pairs = [
        {"question": row["messages"][-1]["content"], "answer": str(row["ground_truth"])}
        for row in rows
    ]
    (folder / "sums.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (folder / "tasks").mkdir()
    (folder / "tasks" / "sums.yaml").write_text(SUMS.format(folder=folder))
    choices = json.dumps(list(CHOICES))
    (folder / "tasks" / "choice.yaml").write_text(CHOICE.format(folder=folder, choices=choices))
    (folder / "my_task.py").write_text(TASK)
    return folder


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    served = Served(tmp_path_factory.mktemp("platform") / "data")
    deployments = DeploymentManager("any", served.url)
    deployments.create_or_get(DeploymentConfig(deployment_id="first", base_model=str(MODEL)))
    deployments.wait_for_ready("first")
    deployments.close()
    yield served
    served.stop()


def run_block(program, folder, served, *replaced):
    """Run the page's block that begins a program, on our tasks and platform."""
    blocks = [block.text for block in read_blocks(PAGE.read_text()) if block.language == "sh"]
    (text,) = [block for block in blocks if f"\n{program} " in block]
    for said, ours in [("http://127.0.0.1:8000", served.url), *replaced]:
        assert said in text
        text = text.replace(said, ours)
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    environment = os.environ | offline | {"PATH": f"{PROGRAMS}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-euc", text],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def greedy_answers(served, folder):
    """How many rows the deployment answers right by its likeliest tokens, asked by ourselves."""
    import httpx

    right = 0
    for line in (folder / "sums.jsonl").read_text().splitlines():
        row = json.loads(line)
        body = {
            "model": "first",
            "messages": [{"role": "user", "content": row["question"]}],
            "temperature": 0,
            "max_tokens": 16,
        }
        answer = httpx.post(
            f"{served.url}/v1/chat/completions", json=body, headers={"x-api-key": "any"}, timeout=60
        )
        text = answer.json()["choices"][0]["message"]["content"]
        right += f"<answer>{row['answer']}</answer>" in text
    return right / ROWS


def likeliest_choices(folder):
    """How often the second of the choices is the likeliest, by transformers."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(str(MODEL))
    model = transformers.AutoModelForCausalLM.from_pretrained(str(MODEL), dtype=torch.float32)
    second = 0
    for line in (folder / "sums.jsonl").read_text().splitlines():
        question = json.loads(line)["question"]
        begins = len(tokenizer(question).input_ids)
        scores = []
        for choice in CHOICES:
            ids = torch.tensor([tokenizer(question + choice).input_ids])
            with torch.no_grad():
                logprobs = model(ids).logits[0, :-1].log_softmax(-1)
            taken = logprobs.gather(1, ids[0, 1:, None])[begins - 1 :]
            scores.append(float(taken.sum()))
        second += max(scores) == scores[1]
    return second / ROWS


def test_lm_eval_measures_answers_and_probabilities_as_they_are(folder, served):
    ours = [
        ("gsm8k", "sums --include_path tasks"),
        ("hellaswag", "choice --include_path tasks"),
        ("Qwen/Qwen3-0.6B", str(MODEL)),
    ]
    run_block("lm-eval", folder, served, *ours)

    results = {}
    for file in (folder / "runs" / "lm-eval").rglob("results_*.json"):
        results |= json.loads(file.read_text())["results"]
    assert results["sums"]["exact_match,answer"] == greedy_answers(served, folder) > 0.5
    assert results["choice"]["acc,none"] == likeliest_choices(folder)


def test_inspect_measures_answers_as_they_are(folder, served):
    run_block("inspect", folder, served, ("--max-tokens 512", "--max-tokens 16 --temperature 0"))

    (file,) = (folder / "runs" / "inspect").glob("*.json")
    log = json.loads(file.read_text())
    (scores,) = log["results"]["scores"]
    assert (log["status"], log["results"]["completed_samples"]) == ("success", ROWS)
    assert scores["metrics"]["accuracy"]["value"] == greedy_answers(served, folder)
