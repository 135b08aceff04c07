import pytest

from training.examples.rl.tool_use.calculator import calculate, calculator


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("37 * 48", "1776"),
        (" 2 + 3 * 4 ", "14"),
        ("(2 + 3) * -4", "-20"),
        ("7 / 2", "3.5"),
        ("6 / 2", "3"),
        ("1 / 3", "0.3333333333"),
        ("0.1 + 0.2 - 0.3", "0"),
        ("7 // 2 + 7 % 4", "6"),
        ("-7 // 2", "-4"),
        ("2 ** 64", "18446744073709551616"),
        ("2 ** -1", "0.5"),
        ("+5", "5"),
        ("1e3", "1000"),
        ("9" * 40, "9" * 40),
    ],
)
def test_arithmetic_is_exact_and_is_told_in_ten_digits_where_it_is_not_whole(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("37 x 48", r"expression must be like \(2 \+ 3\) \* 4, got '37 x 48'"),
        ("", r"expression must be like .*, got ''"),
        ("2 +", "expression must be like"),
        ("2\0", "expression must be like"),
        ("x", "expression must be like"),
        ("True + 1", "expression must be like"),
        ("'a' * 3", "expression must be like"),
        ("1j", "expression must be like"),
        ("1 < 2", "expression must be like"),
        ("[1, 2]", "expression must be like"),
        ("abs(-1)", "expression must be like"),
        ("__import__('os').getcwd()", "expression must be like"),
        ("2 ^ 3", "expression must be like"),
        ("~1", "expression must be like"),
        ("(" * 45 + "1", "expression must be like"),
        ("1 / (2 - 2)", "expression must not divide by 0"),
        ("1 % 0", "expression must not divide by 0"),
        ("0 ** -1", "expression must not divide by 0"),
        ("9" * 41, "numbers must have at most 40 digits"),
        ("1e400", "numbers must have at most 40 digits"),
        ("1e-41", "numbers must have at most 40 digits"),
        ("10 ** 20 * 10 ** 20", "numbers must have at most 40 digits"),
        ("9 ** 64", "numbers must have at most 40 digits"),
        ("2 ** 65", "exponents must be whole and at most 64, got 65"),
        ("2 ** 0.5", "exponents must be whole and at most 64, got 0.5"),
        ("1 + " * 25 + "1", "expression must have at most 100 characters, got 101"),
    ],
)
def test_what_cannot_be_calculated_is_refused_with_a_sentence_for_the_model(expression, reason):
    with pytest.raises(ValueError, match=reason):
        calculate(expression)


def test_nested_powers_are_refused_before_they_grow():
    with pytest.raises(ValueError, match="exponents must be whole and at most 64, got 3486784401"):
        calculate("9 ** 9 ** 10")


def test_the_tool_takes_its_expression_from_the_arguments_of_the_call():
    assert calculator({"expression": "2 + 3", "unit": "apples"}) == "5"
    with pytest.raises(ValueError, match=r"arguments must hold an expression, got \{'expr': '1'\}"):
        calculator({"expr": "1"})
    with pytest.raises(ValueError, match="arguments must hold an expression"):
        calculator({"expression": 5})
