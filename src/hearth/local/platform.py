"""The embedded platform: the very apps that a served one runs, inside the process that uses them.

Its state lives in memory, its checkpoints and promoted models in ``work_dir``; requests reach it
without a socket.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hearth.control.access import Access
from hearth.control.app import create_gateway
from hearth.control.catalog import has_experts, read_catalog
from hearth.control.context import Context
from hearth.control.plane import ControlPlane
from hearth.control.store import Store
from hearth.errors import ConfigError
from hearth.launch.processes import ProcessLauncher
from hearth.launch.ray import make_ray_launcher
from hearth.launch.spec import Launcher, Placement
from hearth.objects import check_store
from hearth.sdk.background import start
from hearth.sdk.transport import mount, unmount

logger = logging.getLogger(__name__)

_numbers = itertools.count(1)


class EmbeddedPlatform:
    """One platform inside this process, at a base URL of its own until ``close``.

    Trainers and deployments are threads (``inline``), processes that end with this one, or actors
    of a Ray cluster that do. Snapshots go between them as ``snapshot_store`` says.

    Raises:
        ConfigError: the catalog of models cannot be read, or there is no such placement.
    """

    def __init__(
        self,
        *,
        work_dir: Path,
        placement: Placement = "inline",
        catalog: Path | None = None,
        snapshot_store: str = "folder",
    ) -> None:
        if placement not in ("inline", "process", "ray"):
            raise ConfigError(f"placement must be 'inline', 'process' or 'ray', got {placement!r}")
        check_store(snapshot_store, placement)
        launcher: Launcher
        if placement == "inline":
            from hearth.kernels.build import load_library

            # A compiler that has to run first does so beside what is imported here and loaded next.
            threading.Thread(target=load_library, name="hearth-kernels", daemon=True).start()
            from hearth.local.inline import InlineLauncher  # seconds, which a bad config is spared

            launcher = InlineLauncher(work_dir)
        elif placement == "process":
            launcher = ProcessLauncher(
                work_dir, snapshot_store=snapshot_store, die_with_parent=True
            )
        else:
            launcher = make_ray_launcher(
                work_dir, snapshot_store=snapshot_store, die_with_parent=True
            )
        self.base_url = f"http://embedded-{next(_numbers)}.hearth.internal"
        context = Context(launcher=launcher, catalog=read_catalog(catalog), data_dir=work_dir)
        self.plane = ControlPlane(Store(), context)
        self._gateway = create_gateway(self.plane, Access(is_local=False))
        mount(self.base_url, self._gateway)
        logger.debug("embedded platform at %s", self.base_url)

    def __enter__(self) -> EmbeddedPlatform:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop every engine; later requests are ``ClosedError``."""
        unmount(self.base_url)
        self.plane.close()
        # Its connections to workers were opened on the SDK's loop.
        start(self._gateway.close()).result()


def resolve_model(name: str) -> str:
    """The folder or hub id that a model name stands for on an embedded platform.

    Raises:
        ConfigError: the name looks registered (``accounts/...``) and is not, or looks like a path
            and is no folder.
    """
    return read_catalog().find_model(name).source


def check_adapter_is_servable(base_model: str, targets: Sequence[str], engine: str | None) -> None:
    """Refuse an adapter that the deployment of an embedded platform could not serve.

    Raises:
        ConfigError: ``engine`` is vLLM and ``lora_targets`` would change a mixture's experts.
    """
    if engine != "vllm" or "mlp" not in targets:
        return
    import transformers  # takes two seconds, and only this case needs it

    try:
        config, _ = transformers.PretrainedConfig.get_config_dict(resolve_model(base_model))
    except (OSError, ValueError):
        return  # loading the model says why
    if has_experts(config):
        raise ConfigError(
            "lora_targets must leave out 'mlp' for a mixture of experts with deployment.engine "
            f"'vllm', which serves no adapter of experts, got {list(targets)}: choose ['attn'], "
            "engine 'embedded', or first_checkpoint_type 'merged_base', which sends "
            "the whole model in each weight sync"
        )


def check_tokenizer(tokenizer: Any, tokenizer_model: str, base_model: str) -> None:
    """Refuse a client's tokenizer that is not the one of the model that an embedded platform loads.

    Raises:
        ConfigError: ``deployment.tokenizer_model`` names one whose ids mean other tokens.
    """
    # With torch behind it, which a process that only serves does without.
    from hearth.models import vocabulary

    source = resolve_model(base_model)
    vocabulary.check_tokenizer(
        tokenizer, tokenizer_model, source, field="deployment.tokenizer_model"
    )
