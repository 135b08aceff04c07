"""On-policy distillation: both KLs and their gradients against float64, and that it teaches."""

import pytest
import torch
from tests.integration.runs import read_samples, read_steps
from tests.integration.supervised import Reference, check_weights, copy_model, shaken_model

from hearth.errors import ConfigError
from hearth.records.reading import iterate_tables
from training.quickstart import MODEL, TRAIN_ROWS
from training.recipes.distillation_loop import Config, main

LINEAR = {"learning_rate": 1.0, "eps": 1.0, "weight_decay": 0.0, "grad_clip_norm": 0.0}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """Another model than the shipped one, with its tokens."""
    return shaken_model(tmp_path_factory.mktemp("models") / "shaken")


def config(folder, teacher, **changes):
    usual = {
        "log_path": str(folder),
        "base_model": str(MODEL),
        "teacher_model": str(teacher),
        "dataset": str(TRAIN_ROWS),
        "max_rows": 4,
        "completions_per_prompt": 2,
        "prompt_groups_per_step": 4,
        "max_completion_tokens": 12,
        "max_seq_len": 64,
    }
    return Config(**usual | changes)


def sampled(folder):
    """Token ids of prompt and answer of each trained sample."""
    for table in iterate_tables(folder, "train"):
        for line in table.to_pylist():
            yield line["tokens"][: line["prompt_len"]], line["tokens"][line["prompt_len"] :]


def places(reference, prompt, answer):
    """Log-probabilities of all tokens at each place of an answer, float64 [T, V]."""
    logits = reference.model(torch.tensor([prompt + answer])).logits[0]
    return logits[len(prompt) - 1 : -1].log_softmax(-1)


def both_losses(folder, teacher, k):
    """(KL, loss to minimize) per token: of the sampled tokens, and of the teacher's top k."""
    student, master = Reference(), Reference(teacher)
    kls, pulls, top_kls, count = [], [], [], 0
    for prompt, answer in sampled(folder):
        own = places(student, prompt, answer)
        with torch.no_grad():
            told = places(master, prompt, answer)
        chosen = torch.tensor(answer)[:, None]
        mine, theirs = own.gather(1, chosen)[:, 0], told.gather(1, chosen)[:, 0]
        kls.append((mine - theirs).detach().sum())
        pulls.append(-((theirs - mine.detach()) * mine).sum())
        top = told.topk(k, dim=1)
        shares = top.values.softmax(1)
        top_kls.append((shares * (shares.log() - own.gather(1, top.indices))).sum())
        count += len(answer)
    reverse = sum(kls) / count, sum(pulls) / count
    return student, reverse, sum(top_kls) / count


def test_the_reverse_kl_and_its_gradient_are_those_of_float64(tmp_path, teacher):
    main(config(tmp_path, teacher, **LINEAR))

    student, (kl, loss), _ = both_losses(tmp_path, teacher, 4)
    expected = student.step(loss, rate=1.0, eps=1.0)
    (step,) = read_steps(tmp_path)
    assert kl > 0
    assert step["train/teacher_kl"] == pytest.approx(float(kl), rel=1e-5)
    assert step["train/grad_norm"] == pytest.approx(student.grad_norm, rel=1e-4)
    check_weights(tmp_path, expected, tolerance=1e-3)
    assert all(sample["outcome"] == "trained" for sample in read_samples(tmp_path))


def test_the_kl_of_the_teachers_top_k_and_its_gradient_are_those_of_float64(tmp_path, teacher):
    main(config(tmp_path, teacher, distill_loss="top_k", teacher_top_k=4, **LINEAR))

    student, _, loss = both_losses(tmp_path, teacher, 4)
    expected = student.step(loss, rate=1.0, eps=1.0)
    (step,) = read_steps(tmp_path)
    assert step["train/teacher_kl"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert step["train/grad_norm"] == pytest.approx(student.grad_norm, rel=1e-4)
    assert step["parity/p95"] < 1e-4  # of the sampled tokens, the first candidates
    check_weights(tmp_path, expected, tolerance=1e-3)


@pytest.mark.parametrize("distill_loss", ["reverse_kl", "top_k"])
def test_the_student_comes_nearer_to_its_teacher(tmp_path, teacher, distill_loss):
    settings = {"max_rows": 160, "prompt_groups_per_step": 16, "completions_per_prompt": 4}
    settings |= {"base_model": str(teacher), "learning_rate": 1e-3}

    summary = main(config(tmp_path, MODEL, distill_loss=distill_loss, **settings))

    kls = [step["train/teacher_kl"] for step in read_steps(tmp_path)]
    assert summary.steps == len(kls) == 10
    assert sum(kls[-3:]) < 0.6 * sum(kls[:3])
    assert "tags: [distillation, " in (summary.model_path / "README.md").read_text()


def test_a_teacher_of_another_vocabulary_is_refused(tmp_path, teacher):
    from transformers import AutoTokenizer

    other = copy_model(tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(other)

    with pytest.raises(ConfigError, match="teacher_model must have the tokenizer of base_model"):
        main(config(tmp_path / "run", other))

    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"teacher_model": ""}, "teacher_model must be a registered name, a folder or a hub id"),
        ({"temperature": 0.7}, r"temperature must be 1, got 0\.7"),
        ({"teacher_top_k": 0}, "teacher_top_k must be >= 1, got 0"),
        ({"teacher_top_k": 21}, "teacher_top_k must be <= 20, got 21"),
        ({"distill_loss": "top_k", "kl_beta": 0.1}, r"kl_beta must be 0 with distill_loss='top_k'"),
        ({"completions_per_prompt": 0}, "completions_per_prompt must be >= 1, got 0"),
    ],
)
def test_settings_are_judged(changes, message):
    with pytest.raises(ConfigError, match=message):
        Config(**{"base_model": "m", "teacher_model": "t"} | changes).validate()
