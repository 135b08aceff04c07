import re

import pytest
import torch
import transformers

from training.data.rows import load_rows
from training.quickstart import HELDOUT_ROWS, MODEL, TRAIN_ROWS
from training.rewards import answer_reward


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def model():
    return transformers.AutoModelForCausalLM.from_pretrained(MODEL).eval()


@pytest.fixture(scope="module")
def replies(model, tokenizer):
    """Sampled and greedy texts for the held-out rows."""
    rows = load_rows(str(HELDOUT_ROWS))
    prompts = [
        tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, tokenize=False)
        for row in rows
    ]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")

    def reply(**how):
        with torch.random.fork_rng(), torch.inference_mode():
            torch.manual_seed(0)
            sequences = model.generate(**inputs, max_new_tokens=16, **how)
        return tokenizer.batch_decode(
            sequences[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )

    return rows, reply(do_sample=True, top_k=0), reply(do_sample=False)


def accuracy(rows, texts):
    return sum(answer_reward(text, row) for text, row in zip(texts, rows, strict=True)) / len(rows)


def operands(row):
    question = row["messages"][0]["content"]
    numbers = sorted(map(int, re.findall(r"\d+", question)))
    is_sum = any(word in question for word in ("+", "plus", "Add", "sum"))
    return is_sum, *numbers


def test_the_shipped_model_is_at_most_three_megabytes():
    assert sum(path.stat().st_size for path in MODEL.iterdir()) <= 3 * 10**6


@pytest.mark.parametrize(
    "text", ["What is 37 + 48?", "naïve café 日本 🙂\n\ttabs", "<answer>85</answer>"]
)
def test_any_text_survives_the_tokenizer(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_digit_is_a_token_of_its_own(tokenizer):
    tokens = tokenizer.convert_ids_to_tokens(tokenizer.encode("1234567890 1+1"))

    assert all(len(re.sub(r"\D", "", token)) <= 1 for token in tokens)


def test_a_conversation_opens_the_models_turn(tokenizer):
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1 + 1?"}], add_generation_prompt=True, tokenize=False
    )

    assert text.endswith("assistant\n")
    assert "1 + 1?" in text


def test_no_held_out_problem_is_among_the_training_rows():
    train = {operands(row) for row in load_rows(str(TRAIN_ROWS))}
    held_out = {operands(row) for row in load_rows(str(HELDOUT_ROWS))}

    assert len(held_out) >= 200
    assert not train & held_out


def test_ground_truths_are_right():
    for row in load_rows(str(TRAIN_ROWS)) + load_rows(str(HELDOUT_ROWS)):
        is_sum, low, high = operands(row)
        assert int(row["ground_truth"]) == (low + high if is_sum else high - low)


@pytest.mark.slow
def test_the_model_is_right_less_than_half_of_the_time_although_it_knows_better(replies):
    rows, sampled, greedy = replies

    assert 0.2 < accuracy(rows, sampled) < 0.5
    assert accuracy(rows, greedy) > 0.8


@pytest.mark.slow
def test_most_answers_have_the_format(replies):
    _, sampled, _ = replies

    shaped = [re.search(r"<answer>.*</answer>", text) is not None for text in sampled]
    assert sum(shaped) / len(shaped) > 0.7
