"""Checks of the settings that shape rollouts beside training; none needs a model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import orjson

from hearth.errors import ConfigError
from hearth.settings import URL_VARIABLE
from training.config.async_recipe import AsyncConfig
from training.platform.run_infra import is_embedded
from training.rollouts.queue import gate_limits


def rollout_problems(config: AsyncConfig) -> Iterator[str]:
    """What is wrong with the settings that not all recipes share."""
    group = config.completions_per_prompt
    if min(group, config.prompt_groups_per_step) >= 1:  # else validate() tells
        try:
            gate_limits(config)
        except ConfigError as error:
            yield str(error)
    if group >= 1 and not 1 <= config.min_group_size <= group:
        yield (
            f"min_group_size must lie between 1 and completions_per_prompt ({group}), got "
            f"{config.min_group_size}"
        )
    if config.rollout_retries < 0:
        yield f"rollout_retries must be >= 0, got {config.rollout_retries}"
    if config.rollout_workers == "ray" and is_embedded():
        yield (
            f"rollout_workers must be 'loop' without {URL_VARIABLE}, got 'ray': processes "
            "elsewhere cannot reach a platform inside this one; start `hearth serve`"
        )
    if config.rollout_worker_count < 1:
        yield f"rollout_worker_count must be >= 1, got {config.rollout_worker_count}"
    if config.parity_probe_tokens < 0:
        yield f"parity_probe_tokens must be >= 0, got {config.parity_probe_tokens}: 0 is no probe"
    for name in ("rollout_timeout_s", "stall_timeout_s"):
        seconds: float | None = getattr(config, name)
        if seconds is not None and not seconds > 0:
            yield f"{name} must be > 0 seconds, got {seconds}"
    if config.late_row_wait_s is not None and not config.late_row_wait_s >= 0:
        yield f"late_row_wait_s must be >= 0 seconds or None, got {config.late_row_wait_s}"
    with contextlib.suppress(ConfigError):  # of two spellings, which validate() tells of
        if config.sync.interval != 1:
            yield (
                f"weight_sync_interval must be 1, got {config.sync.interval}: versions are counted "
                "by weight syncs; raise max_head_offpolicy_versions for more overlap"
            )
    try:
        orjson.dumps(config.rollout_extras)
    except TypeError as error:
        yield (
            f"rollout_extras must be plain values, got {config.rollout_extras!r} ({error}): close "
            "over anything else in your rollout_fn_factory"
        )
