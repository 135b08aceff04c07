"""Document 003: the oldest generation, from separate parts. One namespace, in the text's order."""

from __future__ import annotations

import ast
import dataclasses

import pytest
import tinker
import torch
from tests.documents import extraction
from tests.integration.runs import read_steps

import training.utils
from hearth.errors import HearthError
from training.samples.datums import token_logprobs
from training.utils import DeployConfig, HotloadConfig, ISConfig, WandBConfig
from training.utils.rl import (
    build_grpo_datums,
    group_advantages,
    make_grpo_loss_fn,
    make_offpolicy_grpo_loss_fn,
)

PROVISION, LOSS = "Step 1: Provision resources", "Step 3: GRPO loss function"
DATA, LOOP = "Step 2: Build training data", "Step 4: On-policy training loop (prompt-batched)"
OFF_POLICY, RECIPE = "Off-policy variant", "Cookbook recipe entrypoint"
FIELDS, SUB_CONFIGS = "Config fields reference", "Sub-configs: "

# What the fragment leaves to its reader, by the names that it uses.
OUTER = """
K, advantages = len(rewards), group_advantages(rewards)
ref_tensors = list(map(torch.tensor, ref_logprobs_list))
behavior_tensors = list(map(torch.tensor, behavior_logprobs_list))
"""
TOTALS = "total_loss, metrics = 0.0, {}"
SAMPLE = """
advantage, weights = advantages[i], data[i].loss_fn_inputs["weights"].to_torch()
n_response_tokens = weights.sum()
pi_sum, kl_term = (pi_lp * weights).sum(), ((pi_lp - ref_lp) * weights).sum()
"""


@pytest.fixture(scope="module")
def names(document, substituted, platform, reader):
    """The namespace behind steps 1 to 3: clients of running trainers, and both functions."""
    given = reader()
    for heading in (PROVISION, DATA, LOSS):
        extraction.execute(substituted(document("003").after(heading).text), given)
    yield given
    given["policy_svc"].close()
    given["ref_svc"].close()


@pytest.fixture(scope="module")
def trained(names, document, substituted):
    """The namespace behind step 4."""
    extraction.execute(substituted(document("003").after(LOOP).text), names)
    return names


def logprobs(client, datums):
    outputs = client.forward(datums, "cross_entropy").result().loss_fn_outputs
    return [list(output["logprobs"].data) for output in outputs]


def loss_and_gradients(loss_fn, datums):
    torch.manual_seed(0)
    rows = [(-torch.rand(datum.model_input.length)).requires_grad_(True) for datum in datums]
    loss, metrics = loss_fn(datums, rows)
    return loss.item(), torch.autograd.grad(loss, rows), metrics


def random_datums():
    weights = tinker.TensorData(data=[0.0, 1.0, 1.0, 1.0], dtype="float32", shape=[4])
    return [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints([5, 6, 7, 8]),
            loss_fn_inputs={"weights": weights},
        )
        for _ in range(3)
    ]


def assert_same_loss(theirs, ours):
    datums = random_datums()
    loss, gradients, metrics = loss_and_gradients(theirs, datums)
    own_loss, own_gradients, own_metrics = loss_and_gradients(ours, datums)
    assert own_loss == pytest.approx(loss, rel=1e-6)
    for gradient, own in zip(gradients, own_gradients, strict=True):
        assert torch.allclose(gradient, own, rtol=1e-6, atol=1e-7)
    assert all(own_metrics[name] == pytest.approx(value) for name, value in metrics.items())


def test_every_snippet_has_a_test(document):
    assert len(document("003").snippets) == 7


def test_both_trainers_run_and_the_reference_is_frozen(names, platform):
    trainers = platform.trainers()
    policy, reference = (
        trainers.get(names[f"{role}_ep"].job_id) for role in ("policy", "reference")
    )
    trainers.close()

    assert (policy.state, reference.state) == ("JOB_STATE_RUNNING", "JOB_STATE_RUNNING")
    assert (policy.forward_only, reference.forward_only) == (False, True)
    assert reference.training_config.extra_args == ["--forward-only", "--no-compile"]
    assert policy.hot_load_deployment_id == "grpo-serving"
    step = names["reference_client"].optim_step(tinker.AdamParams(learning_rate=1e-3))
    with pytest.raises(HearthError, match=r"forward"):
        step.result()


def test_with_a_rank_both_trainers_are_lora_and_the_reference_is_the_base(
    document, substituted, reader, names, platform
):
    """The loop with an adapter: the prose promises LoRA for both trainers."""
    given = reader()
    # The page's own clients are closed by the reader, at the module's end.
    for heading in (PROVISION, DATA, LOSS, LOOP):
        code = substituted(document("003").after(heading).text)
        code = code.replace("lora_rank=0", "lora_rank=8").replace("grpo-serving", "grpo-lora")
        extraction.execute(code, given)

    trainers = platform.trainers()
    jobs = [trainers.get(given[f"{role}_ep"].job_id) for role in ("policy", "reference")]
    trainers.close()
    assert [job.forward_only for job in jobs] == [False, True]
    assert [job.training_config.lora_rank for job in jobs] == [8, 8]
    datums = given["combined_datums"]
    policy, reference = given["policy_client"], given["reference_client"]
    assert (policy.lora_rank, reference.lora_rank) == (8, 8)
    base = logprobs(names["reference_client"], datums)
    assert logprobs(reference, datums) == base
    assert logprobs(policy, datums) != base
    with pytest.raises(HearthError, match="must run on a trainable model"):
        reference.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()


def test_its_datums_are_ours(names):
    messages = names["dataset"].rows[0]["messages"]
    completions = names["sampler"].sample_with_tokens(messages, n=2, max_tokens=8, seed=1)

    theirs, ours = names["build_grpo_datums"](completions), build_grpo_datums(completions)

    for datums in (theirs, ours):
        assert [datum.model_input.to_ints() for datum in datums] == [
            c.full_tokens[:-1] for c in completions
        ]
        values = [
            {name: row.data for name, row in datum.loss_fn_inputs.items()} for datum in datums
        ]
        assert values == [
            {
                "target_tokens": c.full_tokens[1:],
                "weights": [0.0] * (c.prompt_len - 1) + [1.0] * c.completion_len,
            }
            for c in completions
        ]


def test_its_loss_function_is_ours(names):
    references = [[-0.5, -0.1, -0.9, -0.3], [-1.0, -0.4, -0.6, -0.2], [-0.2, -0.2, -0.8, -0.7]]
    for rewards in ([1.0, 0.0, 0.5], [1.0, 1.0, 1.0]):
        given = (rewards, references)
        assert_same_loss(names["make_grpo_loss_fn"](*given), make_grpo_loss_fn(*given))


def test_the_loop_trains_the_policy_and_publishes_every_step(trained, platform):
    steps = trained["global_step"]
    datums = trained["combined_datums"]

    (served,) = trained["sampler"].sample_with_tokens(trained["input_messages"], n=1, max_tokens=1)
    policy, reference = (
        logprobs(trained[f"{role}_client"], datums) for role in ("policy", "reference")
    )

    names = platform.snapshots(trained["policy_ep"].job_id, served.snapshot_identity)
    assert steps == len(trained["dataset"].rows)
    assert names == [f"step-{number:05d}" for number in range(1, steps + 1)]
    assert served.snapshot_identity.startswith(f"{names[-1]}-")
    assert served.weight_version == steps
    assert policy != reference
    assert {"grpo_loss", "mean_kl"} <= set(trained["result"].metrics)


@pytest.mark.parametrize("account", ["me", ""], ids=["account", "FIREWORKS_ACCOUNT_ID not set"])
def test_the_prefill_gives_the_trainers_logprobs_of_the_served_weights(
    trained, document, platform, account
):
    completion = trained["completions"][0]
    trained |= {"token_ids": completion.full_tokens, "deployment_id": "grpo-serving"}
    trained |= {"account_id": account}
    code = document("003").after(OFF_POLICY, 1).text

    extraction.execute(code.replace("https://api.fireworks.ai", platform.url), trained)

    values = trained["behavior_logprobs"]
    length = len(completion.full_tokens)
    assert values[0] is None
    assert len(values) == length + 1
    _, *rows = token_logprobs(values, num_tokens=length, prompt_len=completion.prompt_len)
    (trainers,) = logprobs(trained["policy_client"], trained["datums"][:1])
    assert rows == pytest.approx(trainers, abs=1e-4)


def test_the_off_policy_fragment_completed_is_ours(document, trained):
    tree = ast.parse(document("003").after(OFF_POLICY).text)
    outer = tree.body[0]
    closure = next(statement for statement in outer.body if isinstance(statement, ast.FunctionDef))
    loop = next(statement for statement in closure.body if isinstance(statement, ast.For))
    loop.body[3:3] = ast.parse(SAMPLE).body
    closure.body[:0] = ast.parse(TOTALS).body
    outer.body[:0] = ast.parse(OUTER).body
    trained["group_advantages"] = group_advantages
    extraction.execute(tree, trained)

    references = [[-0.5, -0.1, -0.9, -0.3], [-1.0, -0.4, -0.6, -0.2], [-0.2, -0.2, -0.8, -0.7]]
    behaviors = [[-0.1, -0.7, -0.3, -0.3], [-2.0, -0.9, -9.0, -0.1], [-0.3, -0.1, -0.9, -0.6]]
    given = ([1.0, 0.0, 0.5], references, behaviors)

    assert_same_loss(
        trained["make_offpolicy_grpo_loss_fn"](*given), make_offpolicy_grpo_loss_fn(*given)
    )


def test_the_recipe_takes_the_oldest_names(document, substituted, trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    extraction.execute(substituted(document("003").after(RECIPE).text), trained)

    (log,) = tmp_path.glob("runs/*/metrics.jsonl")
    steps = read_steps(log.parent)
    assert len(steps) >= 2
    assert all(step["train/grad_norm"] > 0 and "train/mean_kl" in step for step in steps)
    assert trained["cfg"].sync.interval == 1
    assert isinstance(trained["cfg"].hotload, HotloadConfig)


def test_its_older_switches_reach_the_run(trained, tmp_path):
    changed = dataclasses.replace(
        trained["cfg"],
        tis_enabled=True,
        tis=ISConfig(clip_high=1.0),
        min_samples_per_fwd_bwd=4,
        max_samples_per_fwd_bwd=8,
        prompt_groups_per_step=2,
        max_rows=4,
        log_path=str(tmp_path),
        wandb=WandBConfig(),
        truncated_completions="score",
    )

    trained["main"](changed)

    steps = read_steps(tmp_path)
    assert len(steps) >= 1
    for step in steps:
        assert 0 < step["train/tis/weight_mean"] <= 1.0
        assert step["batch/mean_samples_per_fwd_bwd"] == 4
    assert any(step["rollout/valid_prompt_groups"] == 2 for step in steps)


def test_the_table_of_fields_is_the_recipes(document):
    from training.recipes.rl_loop import Config

    text = document("003").text.splitlines()
    start = text.index(FIELDS) + 1
    end = next(number for number in range(start, len(text)) if text[number].startswith(SUB_CONFIGS))
    config = Config()
    expected = {
        "base_model": '"accounts/fireworks/models/qwen3-8b"',
        "learning_rate": "1e-5",
        "kl_beta": "0.001",
        "completions_per_prompt": "4",
        "max_completion_tokens": "1024",
        "temperature": "1.0",
        "epochs": "1",
        "max_seq_len": "4096",
        "lora_rank": "0",
        "prompt_groups_per_step": "1",
        "min_samples_per_fwd_bwd": "None",
        "max_samples_per_fwd_bwd": "256",
        "max_concurrent": "32",
        "policy_loss": '"grpo"',
        "tis_enabled": "False",
        "router_replay": "False",
    }
    # We use all rows unless told otherwise: a hundred of 7,473 is a surprise.
    others = {"dataset", "max_rows"}
    rows = [line for line in text[start:end] if line.strip()][1:]  # without the table's head
    listed = {name for name in [*expected, *others] if any(r.startswith(name) for r in rows)}
    assert listed == {*expected, *others}
    assert len(rows) == len(listed)
    for name, default in expected.items():
        assert getattr(config, name) == ast.literal_eval(default), name
        assert any(row.startswith(name) and default in row for row in rows), name


def test_the_sub_configs_bear_the_documents_names(document):
    from training.recipes.rl_loop import Config

    (line,) = [line for line in document("003").text.splitlines() if line.startswith(SUB_CONFIGS)]
    names = {
        "infra": "InfraConfig",
        "deployment": "DeployConfig",
        "hotload": "HotloadConfig",
        "wandb": "WandBConfig",
        "resume": "ResumeConfig",
        "tis": "ISConfig",
        "dapo": "DAPOConfig",
        "gspo": "GSPOConfig",
        "cispo": "CISPOConfig",
    }
    for field, name in names.items():
        assert f"{field} ({name})" in line
        kind = getattr(training.utils, name)
        settings = {"deployment": DeployConfig()} | {field: kind()}
        settings["deployment"].tokenizer_model = "a-tokenizer"
        Config(**settings).validate()
