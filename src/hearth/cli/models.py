"""``hearth deploy`` and ``hearth chat``: serve a model, and talk with it."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import tyro
from rich.console import Console

from hearth.cli.resources import ACCOUNT, Platform
from hearth.errors import ConfigError, UnreachableError
from hearth.exit_codes import ExitCode, exit_code
from hearth.records.models import find_model, name_deployment

if TYPE_CHECKING:  # half a second to import, which --help is spared
    from hearth.sdk.transport import Http

_ANSWER_TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class DeployFlags(Platform):
    """Serve a model, or a run's trained model, on the platform."""

    model: Annotated[str, tyro.conf.Positional]
    """A hub id, a registered name, a model's folder, or a run, whose trained model is served."""
    id: str = ""
    """The deployment's id; not given, made of the model's name."""
    context: int | None = None
    """Tokens of the longest sequence; not given, what the model allows."""


@dataclass(frozen=True, kw_only=True)
class ChatFlags(Platform):
    """Talk with a run's trained model, another model, or a deployment."""

    model: Annotated[str, tyro.conf.Positional]
    """A run, a model's folder or a hub id, which is loaded here; or the id of a deployment."""
    message: Annotated[str, tyro.conf.arg(aliases=("-m",))] = ""
    """Ask this alone, print the answer and end."""
    system: str = ""
    """Instructions before the conversation."""
    max_tokens: int = 512
    """Most tokens of an answer."""
    temperature: float = 0.7
    """0 always takes the likeliest token."""


def deploy(arguments: list[str]) -> int:
    """Serve a model, or a run's trained model, on the platform."""
    flags = tyro.cli(DeployFlags, args=arguments, prog="hearth deploy")

    def run() -> None:
        from hearth.sdk.deployment_config import DeploymentConfig

        source = find_model(flags.model)
        id = flags.id or name_deployment(source)
        manager = flags.open_deployments()
        console = Console(soft_wrap=True, highlight=False, markup=False)
        with flags.explain_absence():
            deployment = manager.create_or_get(
                DeploymentConfig(
                    deployment_id=id, base_model=source, max_context_length=flags.context
                )
            )
            if deployment.base_model != source:
                raise ConfigError(
                    f"id must be new, got {id!r}, which serves {deployment.base_model}: "
                    "choose another with --id"
                )
            if deployment.max_replica_count == 0:
                manager.update(id, min_replica_count=1)
            console.print(f"deployment {id} loads {source}")
            manager.wait_for_ready(id)
        console.print(f"it is ready: hearth chat {id}, or with OpenAI's clients")
        console.print(f"  base_url={flags.url}/v1 model={manager.deployment_name(id)}")

    return exit_code(run)


def chat(arguments: list[str]) -> int:
    """Talk with a run's trained model, another model, or a deployment."""
    flags = tyro.cli(ChatFlags, args=arguments, prog="hearth chat")
    code = exit_code(lambda: _chat(flags))
    return ExitCode.DONE if code == ExitCode.INTERRUPTED else code  # Ctrl-C is how it ends


def _chat(flags: ChatFlags) -> None:
    from hearth.sdk.transport import Http

    source = find_model(flags.model).removeprefix(f"accounts/{ACCOUNT}/deployments/")
    if source.startswith(f"accounts/{ACCOUNT}/"):
        raise ConfigError(
            f"model must be a folder, a hub id or a deployment's id, got {source!r}, a name that "
            f"the platform knows: hearth deploy {source} serves it"
        )
    if "/" not in source:
        _converse(Http(flags.url, flags.key), _find_deployment(flags, source), flags)
        return
    with _load(source) as (http, name):
        _converse(http, name, flags)


def _find_deployment(flags: Platform, id: str) -> str:
    """The full name of a deployment.

    Raises:
        ConfigError: the platform has none of this id.
        UnreachableError: no platform answers.
    """
    manager = flags.open_deployments()
    try:
        found = manager.get(id)
    except UnreachableError:
        raise UnreachableError(
            f"model must be a folder, a hub id or a deployment's id, got {id!r}, which is no "
            f"folder; and no platform answers at {flags.url}: start one with `hearth serve`, or "
            "say where it is with --base-url or HEARTH_URL"
        ) from None
    if found is None:
        raise ConfigError(
            f"model must be a folder, a hub id or a deployment at {flags.url}, got {id!r}: "
            "hearth ps lists the deployments"
        )
    return found.name


@contextlib.contextmanager
def _load(source: str) -> Iterator[tuple[Http, str]]:
    """A deployment of the model in this process, until the end of the ``with``."""
    from hearth.local import EmbeddedPlatform  # with torch behind it
    from hearth.sdk.deployment_config import DeploymentConfig
    from hearth.sdk.deployments import DeploymentManager
    from hearth.sdk.transport import Http

    Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print(f"loading {source}")
    with (
        tempfile.TemporaryDirectory(prefix="hearth-chat-") as folder,
        EmbeddedPlatform(work_dir=Path(folder)) as platform,
    ):
        manager = DeploymentManager("embedded", platform.base_url, account_id=ACCOUNT)
        manager.create_or_get(DeploymentConfig(deployment_id="chat", base_model=source))
        manager.wait_for_ready("chat")
        yield Http(platform.base_url, "embedded"), manager.deployment_name("chat")


def _converse(http: Http, model: str, flags: ChatFlags) -> None:
    from hearth.sdk import background
    from hearth.wire.messages import HttpRequest

    messages: list[dict[str, Any]] = []
    if flags.system:
        messages.append({"role": "system", "content": flags.system})
    console = Console(soft_wrap=True, highlight=False, markup=False)
    if not flags.message and sys.stdin.isatty():
        console.print("type a message; an empty line ends")
    for text in [flags.message] if flags.message else _read_messages():
        messages.append({"role": "user", "content": text})
        body = {
            "model": model,
            "messages": messages,
            "max_completion_tokens": flags.max_tokens,
            "temperature": flags.temperature,
        }
        request = HttpRequest(
            "POST", "/v1/chat/completions", orjson.dumps(body), timeout_s=_ANSWER_TIMEOUT_S
        )
        answer = orjson.loads(background.start(http.request(request)).result().content)
        messages.append(
            {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}
        )
        console.print(messages[-1]["content"])


def _read_messages() -> Iterator[str]:
    with contextlib.suppress(EOFError, ImportError):
        import readline  # noqa: F401 - input() then has a history

        while text := input("> " if sys.stdin.isatty() else "").strip():
            yield text
