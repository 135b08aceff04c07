"""The conversations that the example's policy learns from: first good ones, then careless ones.

In the careless ones the tool is called rightly in one of five; the others guess, slip, use a sign
that the calculator does not know, or break the form of a call. So the policy knows how it is done
and often does otherwise, which is what training with rewards then mends.
"""

from __future__ import annotations

import json
import random
from typing import Any

from training.examples.rl.tool_use.calculator import calculator
from training.examples.rl.tool_use.problems import Problem

Message = dict[str, Any]

RIGHT, GUESS, SLIP, WRONG_SIGN = 0.2, 0.4, 0.15, 0.15
"""Shares of careless conversations; the rest breaks the form of the call."""


def good_lesson(problem: Problem, rng: random.Random) -> list[Message]:
    """The problem, the right call, its result and the answer."""
    return [_user_message(problem, rng), *_calculate(problem, problem.answer)]


def careless_lesson(problem: Problem, rng: random.Random) -> list[Message]:
    """One of the conversations above, in their shares."""
    asked, chance = _user_message(problem, rng), rng.random()
    if chance < RIGHT:
        return [asked, *_calculate(problem, problem.answer)]
    if chance < RIGHT + GUESS:
        return [asked, _guess(problem, rng)]
    if chance < RIGHT + GUESS + SLIP:
        other = Problem(problem.a + rng.choice((-10, -1, 1, 10)), problem.b)
        return [asked, *_calculate(other, other.answer)]
    if chance < RIGHT + GUESS + SLIP + WRONG_SIGN:
        mended = [_guess(problem, rng)]
        if rng.random() < 0.5:
            mended = _calculate(problem, problem.answer)
        return [asked, *_call_calculator(f"{problem.a} x {problem.b}"), *mended]
    return [asked, _assistant_message(_broken_call(f"{problem.a} * {problem.b}"))]


def _user_message(problem: Problem, rng: random.Random) -> Message:
    return {"role": "user", "content": problem.question(rng)}


def _assistant_message(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _final_answer(number: int) -> Message:
    return _assistant_message(f"<answer>{number}</answer>")


def _guess(problem: Problem, rng: random.Random) -> Message:
    return _final_answer(rng.randint(problem.answer * 4 // 5, problem.answer * 6 // 5))


def _calculate(problem: Problem, answer: int) -> list[Message]:
    return [*_call_calculator(f"{problem.a} * {problem.b}"), _final_answer(answer)]


def _call_calculator(expression: str) -> list[Message]:
    """A call of the calculator and what comes back."""
    arguments = {"expression": expression}
    try:
        result = calculator(arguments)
    except ValueError as error:
        result = f"error: {error}"
    call = {"type": "function", "function": {"name": "calculator", "arguments": arguments}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": result},
    ]


def _broken_call(expression: str) -> str:
    """A call that lacks its closing braces."""
    call = json.dumps({"name": "calculator", "arguments": {"expression": expression}})
    return f"<tool_call>\n{call[:-2]}\n</tool_call>"
