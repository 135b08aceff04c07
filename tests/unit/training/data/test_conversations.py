"""Which tokens of a conversation are trained: what the template adds to a sampler's prompt."""

import numpy as np
import pytest
from transformers import AutoTokenizer

from hearth.errors import ConfigError
from hearth.sdk.sampling import tokenize_messages
from training.data.conversations import encode_conversation, read_messages
from training.examples.rl.tool_use.policy import CHAT_TEMPLATE as WITH_MARKS
from training.examples.rl.tool_use.policy import TOKENS
from training.quickstart import MODEL

TURNS = [
    {"role": "system", "content": "Add."},
    {"role": "user", "content": "1 + 2"},
    {"role": "assistant", "content": "<answer>3</answer>"},
    {"role": "user", "content": "and 4?"},
    {"role": "assistant", "content": "<answer>7</answer>"},
]
FORGETFUL = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ '...' if m.role == 'assistant' and not loop.last else m.content }}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Shortens answers when more follows, as templates do that leave out earlier reasoning."""


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


def encode(tokenizer, messages, tools=None):
    return encode_conversation(tokenizer, read_messages(messages, "rows[0]"), tools, "rows[0]")


def said(tokenizer, chat):
    """The stretches of tokens that are trained, as text."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], chat.is_said, [0]])))
    return [
        tokenizer.decode(chat.tokens[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)
    ]


def test_every_answer_is_trained_up_to_its_end_token_and_nothing_else(tokenizer):
    chat = encode(tokenizer, TURNS)

    assert said(tokenizer, chat) == ["<answer>3</answer><|im_end|>", "<answer>7</answer><|im_end|>"]
    assert tokenizer.decode(chat.tokens) == tokenizer.apply_chat_template(TURNS, tokenize=False)


def test_what_stands_before_an_answer_is_the_prompt_that_a_sampler_is_given(tokenizer):
    chat = encode(tokenizer, TURNS)

    first = int(np.flatnonzero(chat.is_said)[0])
    assert chat.tokens[:first].tolist() == tokenize_messages(tokenizer, TURNS[:2])


def test_an_answer_of_weight_0_is_read_and_not_trained(tokenizer):
    unsaid = [TURNS[0], TURNS[1], TURNS[2] | {"weight": 0}, *TURNS[3:]]

    chat = encode(tokenizer, unsaid)

    assert said(tokenizer, chat) == ["<answer>7</answer><|im_end|>"]
    assert chat.tokens.tolist() == encode(tokenizer, TURNS).tokens.tolist()


def test_calls_of_tools_are_answers_and_the_mask_is_that_of_the_templates_own_marks(tokenizer):
    tokenizer.add_tokens(list(TOKENS))
    tokenizer.chat_template = WITH_MARKS
    call = {"function": {"name": "calculator", "arguments": {"expression": "2*3"}}}
    tools = [
        {
            "type": "function",
            "function": {"name": "calculator", "parameters": {"properties": {"expression": {}}}},
        }
    ]
    messages = [
        {"role": "user", "content": "2 * 3"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "6"},
        {"role": "assistant", "content": "<answer>6</answer>"},
    ]
    marked = tokenizer.apply_chat_template(
        messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True
    )

    chat = encode(tokenizer, messages, tools)

    assert chat.tokens.tolist() == marked["input_ids"]
    assert chat.is_said.astype(int).tolist() == marked["assistant_masks"]


def test_a_template_that_changes_answers_later_is_refused_but_for_the_last_answer(tokenizer):
    tokenizer.chat_template = FORGETFUL

    with pytest.raises(ConfigError, match=r'changes an answer .*give earlier answers "weight": 0'):
        encode(tokenizer, TURNS)

    last = [TURNS[0], TURNS[1], TURNS[2] | {"weight": 0}, *TURNS[3:]]
    assert said(tokenizer, encode(tokenizer, last)) == ["<answer>7</answer><|im_end|>"]


def test_a_template_without_an_end_token_trains_all_that_it_adds(tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )

    assert said(tokenizer, encode(tokenizer, TURNS))[0] == "<answer>3</answer>\n"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], r"rows\[0\] must be a list of messages that ends with the assistant's, got \[\]"),
        ("hello", "must be a list of messages that ends with the assistant's, got 'hello'"),
        (TURNS[:2], r"must be the assistant's in its last message, got 'user'"),
        ([TURNS[2], TURNS[2]], r"must not be the assistant's in its first message"),
        ([TURNS[1], {"role": "assistant"}], r"rows\[0\]\[1\]\.content must be a string"),
        ([TURNS[1], TURNS[2] | {"weight": 0.5}], r"\[1\]\.weight must be 0 or 1, got 0\.5"),
        ([TURNS[1], TURNS[2] | {"weight": 0}], "must have an answer of weight 1, got none"),
    ],
)
def test_messages_that_cannot_be_trained_are_refused(tokenizer, messages, message):
    with pytest.raises(ConfigError, match=message):
        encode(tokenizer, messages)


def test_what_the_template_raises_is_said(tokenizer):
    tokenizer.chat_template = "{{ raise_exception('no system here') }}"

    with pytest.raises(ConfigError, match=r"rows\[0\] must be what the chat template .* no system"):
        encode(tokenizer, TURNS)
