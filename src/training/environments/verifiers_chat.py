"""A chat loop for verifiers that runs in this process: no program is installed or started.

verifiers finds it as the harness ``hearth_chat``. It answers a task's prompt, calls its tools until
an answer calls none, and has every completion from the rollout's own endpoint.
"""

# Its library may want other versions than the tests' environment has (make test-environments).
# pyright: reportMissingImports=false

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult

__all__ = ["ChatHarness"]


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    """verifiers' own chat loop, without its process."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> ProgramResult:
        """Converse until an answer calls no tool."""
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        async with AsyncExitStack() as stack:
            # On this machine no proxy is between, and there are no certificates to read.
            http = DefaultAsyncHttpxClient(verify=False, trust_env=False)
            client = await stack.enter_async_context(
                AsyncOpenAI(base_url=endpoint, api_key=secret, http_client=http, max_retries=0)
            )
            tools, dispatch, servers = [], {}, {}
            if mcp_urls:
                urls = {name: {"url": url} for name, url in mcp_urls.items()}
                tools, dispatch, servers = await connect_mcp({"mcpServers": urls}, stack, set())
            offered: Any = {"tools": tools} if tools else {}
            while True:
                completion = await client.chat.completions.create(
                    model=ctx.model, messages=messages, **offered
                )
                message = completion.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    return ProgramResult(exit_code=0, stdout="", stderr="")
                for call in message.tool_calls:
                    content = await _run_tool(call, servers, dispatch)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": content})


async def _run_tool(call: Any, servers: Any, dispatch: Any) -> Any:
    """What the policy is told of its call; a wrong one is told as an error."""
    name = call.function.name
    if name not in dispatch:
        return f"error: tool must be one of {', '.join(dispatch)}, got {name[:40]!r}"
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except json.JSONDecodeError as error:
        return f"error: arguments must be JSON: {error}"
    if not isinstance(arguments, dict):
        return "error: arguments must be a JSON object"
    return await call_mcp(servers, dispatch, name, arguments)
