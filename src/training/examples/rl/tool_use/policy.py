"""The example's own policy: the shipped model, taught quickly to call a tool, and to do it badly.

The shipped model has never seen a tool. It gets tokens for calls, a chat template in the form of
Qwen's, and a short supervised warm-up on the conversations of ``lessons``. A model that knows tools
needs none of this: give it as ``base_model``.
"""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from tokenizers import AddedToken
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from training.examples.rl.tool_use.calculator import SCHEMA
from training.examples.rl.tool_use.lessons import Message, careless_lesson, good_lesson
from training.examples.rl.tool_use.problems import split_problems
from training.examples.rl.warm_up import warm_up
from training.quickstart import MODEL

logger = logging.getLogger(__name__)

BATCH = 32
GOOD_SHARE = 0.75
"""Share of the warm-up's batches that are good conversations; they come first."""

TOKENS = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    '\n{"name": "',
    "calculator",
    '", "arguments": {"expression": "',
    '"}}\n',
)
"""Pieces of calls and results that are one token each, so that a call is a dozen tokens."""

# As Qwen's, but for the tools, which are listed in one line to keep prompts short.
CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\nTools:' }}
    {%- for tool in tools %}
        {{- ' ' + tool.function.name + '(' }}
        {{- tool.function.parameters.properties | join(', ') + ')' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' }}
        {{- message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def make_policy(folder: Path, steps: int) -> None:
    """Make the model folder of the policy after ``steps`` batches; it appears whole or not at all.

    The same machine makes the same weights.
    """
    logger.info("the policy is warmed up for %d batches; it is kept in %s", steps, folder)
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    # Minutes on two busy cores, so it shows how far it is.
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    write_policy(unfinished, steps, console)
    unfinished.rename(folder)


def write_policy(folder: Path, steps: int, console: Console) -> None:
    """Warm the shipped model up and write it with its tokenizer."""
    transformers_logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in TOKENS])
    tokenizer.chat_template = CHAT_TEMPLATE
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    train_on_lessons(model, tokenizer, steps, console)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def train_on_lessons(model: Any, tokenizer: Any, steps: int, console: Console) -> None:
    """Train on batches of good conversations and then of careless ones."""
    rng = random.Random(0)
    problems = split_problems()[1]

    def loss_of(step: int) -> torch.Tensor:
        lesson = good_lesson if step < GOOD_SHARE * steps else careless_lesson
        lessons = [lesson(problem, rng) for problem in rng.choices(problems, k=BATCH)]
        return lesson_loss(model, tokenizer, lessons)

    warm_up(model, track(range(steps), "making the policy", console=console), steps, loss_of)


def lesson_loss(model: Any, tokenizer: Any, lessons: Sequence[list[Message]]) -> torch.Tensor:
    """Mean cross-entropy of the tokens that the assistant says."""
    rendered = tokenizer.apply_chat_template(
        list(lessons), tools=[SCHEMA], return_dict=True, return_assistant_tokens_mask=True
    )
    rows = [torch.tensor(row) for row in rendered["input_ids"]]
    said = [torch.tensor(row, dtype=torch.bool) for row in rendered["assistant_masks"]]
    # Padding stands on the right, where causal attention keeps it from what counts.
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    counted = torch.nn.utils.rnn.pad_sequence(said, batch_first=True)[:, 1:]
    hidden = model.model(tokens[:, :-1], use_cache=False).last_hidden_state[counted]
    return functional.cross_entropy(model.lm_head(hidden), tokens[:, 1:][counted])
