"""The example's own policy: the shipped model, taught quickly to call a tool, and to do it badly.

The shipped model has never seen a tool. It gets tokens for calls, a chat template in the form of
Qwen's, and a short supervised warm-up on the conversations of ``lessons``. A model that knows tools
needs none of this: give it as ``base_model``.
"""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from training.data.rows import Row
from training.examples.rl.tool_use.calculator import SCHEMA
from training.examples.rl.tool_use.lessons import careless_lesson, good_lesson
from training.examples.rl.tool_use.problems import split_problems
from training.quickstart import MODEL
from training.recipes.sft_loop import Config, main

logger = logging.getLogger(__name__)

RATE = 3e-3
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
    """Make the model folder of the policy after ``steps`` batches of lessons; 0 teaches nothing.

    It appears whole or not at all. The run that makes it is beside it, as ``FOLDER.warm_up``, where
    a start after a kill goes on. The same machine makes the same weights.
    """
    logger.info("the policy is warmed up for %d batches; it is kept in %s", steps, folder)
    run = folder.with_name(f"{folder.name}.warm_up")
    start = made = run / "start"
    if not start.exists():
        _write_whole(start, write_start)
    if steps:
        config = Config(
            log_path=str(run),
            base_model=str(start),
            batch_size=BATCH,
            shuffle=False,  # good lessons first, careless ones last
            learning_rate=RATE,
            lr_schedule="linear",
            warmup_steps=0.05,
            beta2=0.98,
            weight_decay=0.0,
            max_seq_len=512,
        )
        made = main(config, lesson_rows(steps)).model_path
        assert made is not None, "steps were taken"
    _write_whole(folder, lambda unfinished: shutil.copytree(made, unfinished))


def _write_whole(folder: Path, write: Callable[[Path], object]) -> None:
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    write(unfinished)
    unfinished.rename(folder)


def write_start(folder: Path) -> None:
    """Write the shipped model with tokens for calls, which it does not know yet."""
    transformers_logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in TOKENS])
    tokenizer.chat_template = CHAT_TEMPLATE
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def lesson_rows(steps: int) -> list[Row]:
    """Conversations for so many batches: good ones, and then careless ones."""
    rng = random.Random(0)
    problems = split_problems()[1]
    return [
        {"messages": lesson(problem, rng), "tools": [SCHEMA]}
        for step in range(steps)
        for lesson in [good_lesson if step < GOOD_SHARE * steps else careless_lesson]
        for problem in rng.choices(problems, k=BATCH)
    ]
