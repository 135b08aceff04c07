r"""Answers that are the same mathematically: ``\frac{1}{2}``, ``0.5`` and ``50\%``."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from hearth.errors import ConfigError
from training.rewards.score import Score, ScoringReward

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_BOXED = re.compile(r"\\boxed\s*\{")


class _MathReward(ScoringReward):
    r"""1.0 when math-verify finds the completion's answer equal to the row's ``ground_truth``.

    The last ``<answer>...</answer>`` is the answer; without one it is what math-verify finds: a
    ``\boxed{...}``, or else the last expression of the text, marked or not. It is exact about
    forms (an interval is no tuple) and forgiving about spelling.

    It works in any thread, and so without math-verify's own time limits, which are signals of the
    main thread. An expression may take very long (``100000000!``): use it as ``guarded(math_reward,
    timeout_s=5, isolation="process")`` where completions are not yours.
    """

    def score(self, completion: str, row: Mapping[str, Any]) -> Score:
        """The reward, and whether any expression was found.

        Raises:
            ConfigError: math-verify is not installed, or cannot read the ``ground_truth``.
        """
        try:
            # The optional dependency of hearth-rl[math].
            from math_verify import parse, verify
        except ImportError as error:
            raise ConfigError(
                f"math-verify must be installed for math_reward, got {error}: "
                "pip install 'hearth-rl[math]'"
            ) from None
        # It warns once that its time limits are off, and names arguments that nobody here gave.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        truth = parse(_as_latex(str(row["ground_truth"])), parsing_timeout=0)
        if not truth:
            raise ConfigError(
                f"ground_truth must be an expression that math-verify reads, got "
                f"{row['ground_truth']!r}: use another reward function for such rows"
            )
        marked = _ANSWER.findall(completion)
        answer = _as_latex(marked[-1]) if marked else completion
        found = parse(answer, parsing_timeout=0)
        return Score(float(verify(truth, found, timeout_seconds=0)), parsed=bool(found))


math_reward = _MathReward()
"""``math_reward(completion, row)`` is 1.0 when math-verify finds the completion's answer equal to
the row's ``ground_truth``, else 0.0; its ``score`` says whether there is an expression as well."""


def _as_latex(text: str) -> str:
    """A bare expression between dollars, without which LaTeX is not read as such."""
    marked = _ANSWER.findall(text)
    bare = (marked[-1] if marked else text).strip()
    return bare if "$" in bare or _BOXED.search(bare) else f"${bare}$"
