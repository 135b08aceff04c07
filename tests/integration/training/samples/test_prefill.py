"""Document 003's prefill: the behavior policy's logprobs of tokens that are there already."""

from __future__ import annotations

from typing import Any

import httpx

from hearth.control.access import Access
from hearth.control.app import create_gateway
from training.samples.datums import token_logprobs

REQUEST: dict[str, Any] = {
    "model": "accounts/me/deployments/serving",
    "max_tokens": 1,
    "echo": True,
    "logprobs": 1,
    "prompt_cache_max_len": 0,
}


async def test_the_documents_prefill_request_is_answered_to_whoever_has_a_key(stage, datums):
    infra = stage.setup(needs_inference=True)
    (datum,) = datums(3)[2:]
    gateway = create_gateway(stage.platform.plane, Access(api_keys={"a-key": "me"}))
    transport = httpx.ASGITransport(gateway)

    async with httpx.AsyncClient(transport=transport, base_url="http://keyed.test") as http:

        async def ask(**headers: str) -> httpx.Response:
            return await http.post("/inference/v1/completions", headers=headers, json=body)

        body = REQUEST | {"prompt": whole_of(datum)}
        refused = [await ask(), await ask(Authorization="Bearer another")]
        answer = await ask(Authorization="Bearer a-key")

    assert [answer.status_code for answer in refused] == [401, 401]
    values = answer.json()["choices"][0]["logprobs"]["token_logprobs"]
    assert len(values) == len(body["prompt"]) + 1
    assert values[0] is None
    _, *rows = token_logprobs(values, num_tokens=len(body["prompt"]), prompt_len=2)
    scored = infra.policy.forward([datum], "cross_entropy").loss_fn_outputs
    assert max(abs(a - b) for a, b in zip(rows, scored[0]["logprobs"].data, strict=True)) < 1e-5


def whole_of(datum: Any) -> list[int]:
    """A datum's sequence with its last token."""
    targets = datum.loss_fn_inputs["target_tokens"].data
    return [*datum.model_input.to_ints(), int(targets[-1])]
