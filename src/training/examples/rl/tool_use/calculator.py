"""A calculator for language models: arithmetic of bounded size, with errors made to be read.

An expression is parsed and walked, never executed. What cannot be calculated is refused in one
short sentence with the rule and what breaks it, because the sentence goes back to the model.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

MAX_CHARACTERS = 100
"""Longest expression."""
MAX_DIGITS = 40
"""Most digits of a number, and of the numerator and denominator of a fraction."""
MAX_EXPONENT = 64
"""Largest exponent; its negative is the smallest."""

SCHEMA: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Calculates an arithmetic expression with + - * / // % ** and brackets.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "Such as (2 + 3) * 4"}},
            "required": ["expression"],
        },
    },
}
"""The tool as OpenAI's API describes one."""

_Operation = Callable[[Fraction, Fraction], Fraction | int]

_OPERATIONS: Mapping[type[ast.operator], _Operation] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def calculator(arguments: Mapping[str, Any]) -> str:
    """The result of a call of the tool, whose arguments are as the model wrote them.

    Raises:
        ValueError: there is no ``expression``, or it cannot be calculated.
    """
    expression = arguments.get("expression")
    if not isinstance(expression, str):
        raise ValueError(f"arguments must hold an expression, got {str(dict(arguments))[:40]}")
    return calculate(expression)


def calculate(expression: str) -> str:
    """The value of an arithmetic expression: exact where it is whole, else 10 significant digits.

    Raises:
        ValueError: it is no arithmetic, divides by zero, or is beyond the bounds above.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(
            f"expression must have at most {MAX_CHARACTERS} characters, got {len(expression)}"
        )
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError):  # the latter for a null character
        raise _refusal(expression) from None
    value = _value(tree.body, expression)
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.10g}"


def _value(node: ast.expr, expression: str) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            # A decimal as it was written: 0.1 is a tenth, not the nearest float to it.
            return _calculate_bounded(lambda: Fraction(Decimal(str(number))))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, expression)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand, expression)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left, expression), _value(right, expression))
        case ast.BinOp(left=left, op=op, right=right) if operation := _OPERATIONS.get(type(op)):
            first, second = _value(left, expression), _value(right, expression)
            return _calculate_bounded(lambda: operation(first, second))
        case _:
            raise _refusal(expression)


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > MAX_EXPONENT:
        raise ValueError(
            f"exponents must be whole and at most {MAX_EXPONENT}, got {float(exponent):.10g}"
        )
    return _calculate_bounded(lambda: base ** int(exponent))


def _calculate_bounded(calculation: Callable[[], Fraction | int]) -> Fraction:
    """The result, if it is not too large to go on with."""
    try:
        result = Fraction(calculation())
    except ZeroDivisionError:
        raise ValueError("expression must not divide by 0") from None
    except OverflowError:  # a literal that is an infinite float
        result = Fraction(10**MAX_DIGITS)
    if max(abs(result.numerator), result.denominator) >= 10**MAX_DIGITS:
        raise ValueError(f"numbers must have at most {MAX_DIGITS} digits")
    return result


def _refusal(expression: str) -> ValueError:
    return ValueError(f"expression must be like (2 + 3) * 4, got {expression!r}")
