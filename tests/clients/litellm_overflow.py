"""Asks a deployment through the installed litellm, and for more than its context holds.

    FIREWORKS_BASE_URL=... FIREWORKS_API_KEY=any python -m tests.clients.litellm_overflow MODEL

MODEL is a model of the platform's catalog. Programs over litellm shorten a conversation, or turn to
another model, where it raises ContextWindowExceededError; it knows an overflow by its words.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it asks for a list of prices otherwise
import httpx
import litellm
from tests.clients.calls import Calls, report

PROVIDERS = ("openai", "hosted_vllm", "text-completion-openai")
_DEPLOYMENTS = "/v1/accounts/me/deployments"
_LONG = "one and two " * 20_000
_FITS_AS_TEXT = "1 2 3 4 5 6 7 8 9 " * 300
"""More tokens than the context has, in a text that is not too long before it is tokenized."""


def deploy(model: str) -> None:
    """Have a deployment of the model that answers."""
    headers = {"x-api-key": os.environ["FIREWORKS_API_KEY"]}
    with httpx.Client(
        base_url=os.environ["FIREWORKS_BASE_URL"], headers=headers, timeout=60
    ) as http:
        asked = {"baseModel": model}
        http.post(f"{_DEPLOYMENTS}?deploymentId=litellm", json=asked).raise_for_status()
        ready = {"waitForState": "READY,FAILED", "timeoutS": "50"}
        assert http.get(f"{_DEPLOYMENTS}/litellm", params=ready).json()["state"] == "READY"


def make_calls() -> Calls:
    """What is asked of each provider's way of calling."""
    base = {
        "api_base": f"{os.environ['FIREWORKS_BASE_URL']}/v1",
        "api_key": os.environ["FIREWORKS_API_KEY"],
        "max_tokens": 2,
        "num_retries": 0,
    }

    def chat(provider: str, text: str, **fields: Any) -> Any:
        messages = [{"role": "user", "content": text}]
        return litellm.completion(model=f"{provider}/litellm", messages=messages, **base, **fields)

    def raises(error: type[Exception], call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as raised:
            if type(raised) is error:
                return
            raise
        raise AssertionError(f"{error.__name__} must be raised, got an answer")

    overflow, bad = litellm.ContextWindowExceededError, litellm.BadRequestError
    calls: dict[str, Callable[[], Any]] = {}
    for name in PROVIDERS:
        calls |= {
            f"{name}: answers": lambda name=name: chat(name, "2 + 2"),
            f"{name}: too many tokens": lambda name=name: raises(
                overflow, lambda: chat(name, _FITS_AS_TEXT)
            ),
            f"{name}: too long a text": lambda name=name: raises(
                overflow, lambda: chat(name, _LONG)
            ),
            f"{name}: another mistake": lambda name=name: raises(
                bad, lambda: chat(name, "2 + 2", temperature=-1.0)
            ),
        }
    return calls


def main() -> int:
    """Call them all; the exit code says whether each went as it should."""
    litellm.suppress_debug_info = True  # standard output is the report's
    deploy(sys.argv[1])
    calls = make_calls()
    return report(calls, list(calls), (), ())


if __name__ == "__main__":
    sys.exit(main())
