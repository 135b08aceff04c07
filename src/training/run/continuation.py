"""Whether a start goes on with the run of its folder: what was trained there, and what is to be.

``trained_on.json`` holds what a run is trained on: a fingerprint of its rows, and the settings that
change what is trained. A start with others is refused before anything is provisioned. Settings in
``FREE`` may differ from start to start (docs/resuming.md has them as a table).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import orjson

from hearth.errors import ConfigError
from hearth.files import CHECKSUM, is_intact, seal, write_file
from training.config.parts import flatten, plain_config
from training.config.recipe import RecipeConfig
from training.config.rl import RLConfig
from training.data.rows import Row
from training.run.log_path import aside_path

TRAINED_ON = "trained_on.json"

_FREE_NAMES = """
    log_path dataset max_rows wandb report_to resume output_model_id merge_adapter cleanup_on_exit
    eval_dataset eval_every eval_rows eval_samples_per_prompt no_signal_patience
    parity_threshold parity_stops parity_probe_tokens record_samples record_max_gb

    placement snapshot_store trainer infra deployment teacher
    min_samples_per_fwd_bwd max_samples_per_fwd_bwd scoring_batch

    dcp_save_interval dcp_timeout save_final_checkpoint keep_checkpoints weight_sync hotload
    weight_sync_timeout weight_sync_before_training first_checkpoint_type
    max_concurrent max_concurrency_rollout_sample late_row_wait_s stall_timeout_s
    reward_workers reward_timeout_s reward_errors try_reward
    rollout_workers rollout_worker_count rollout_timeout_s rollout_retries
"""
FREE = frozenset(_FREE_NAMES.split())
"""Settings that may differ between two starts of one run: where it is and how it is watched, where
and in what pieces it computes, when it saves and how long it waits. Rows are compared themselves.
"""

FIXED = frozenset(
    {
        "rows",
        "seed",
        "shuffle",
        "lora_rank",
        "lora_alpha",
        "lora_targets",
        "init_from_checkpoint",
        "warm_start_from_adapter",
    }
)
"""What not even ``resume="force"`` changes: the rows' order and the parameters follow from it."""


@dataclass(frozen=True)
class TrainedOn:
    """What a run is trained on. ``settings`` are flat, as ``{"dapo.eps_clip": 0.2}``."""

    settings: Mapping[str, Any]
    num_rows: int
    rows_sha256: str


def describe_training(config: RecipeConfig, rows: Sequence[Row]) -> TrainedOn:
    """What ``config`` trains on ``rows``, by the names of today where a setting has several."""
    plain = {name: value for name, value in plain_config(config).items() if name not in FREE}
    settings = dict(flatten(plain)) | {"trainer.dtype": config.trainer.dtype}
    part = "tokenizer"
    if isinstance(config, RLConfig):
        part = "deployment"
        settings["weight_sync_interval"] = int(config.sync.interval)
    settings[f"{part}.tokenizer_model"] = config.tokenizer_config.tokenizer_model
    # As they come back from the file: tuples are lists, numbers of a type of ours are plain.
    settings = orjson.loads(orjson.dumps(settings, default=str, option=orjson.OPT_NON_STR_KEYS))
    return TrainedOn(settings, len(rows), hash_rows(rows))


def hash_rows(rows: Sequence[Row]) -> str:
    """A SHA-256 over the rows' contents in their order, hexadecimal."""
    digest = hashlib.sha256()
    for row in rows:
        # The standard library's JSON has room for any int and any text. A value that JSON has no
        # form for counts by its type alone.
        text = json.dumps(
            dict(row), default=lambda value: type(value).__qualname__, sort_keys=True, skipkeys=True
        )
        digest.update(text.encode() + b"\n")
    return digest.hexdigest()


def check_continuation(
    folder: Path, config: RecipeConfig, now: TrainedOn, rows: Sequence[Row]
) -> None:
    """Judge whether the run in ``folder`` may go on with ``config`` and ``rows``.

    A folder whose run has kept nothing to compare, as those of older versions, may.

    Raises:
        ConfigError: the rows or a setting that changes what is trained differ; each is named with
            both values. With ``resume="force"`` those in ``FIXED`` alone are refused. More rows
            behind the old ones may be forced where there is one epoch without shuffling.
    """
    before = read_trained_on(folder)
    if before is None:
        return
    differences = dict(_differences(before, now, _default_settings(config), rows))
    if config.resume.mode == "force":
        grows = config.epochs == 1 and before.settings.get("epochs") == 1 and not config.shuffle
        may_append = grows and hash_rows(rows[: before.num_rows]) == before.rows_sha256
        fixed = FIXED - {"rows"} if may_append else FIXED
        differences = {name: line for name, line in differences.items() if name in fixed}
    if not differences:
        return
    lines = "".join(f"\n  - {name}: {line}" for name, line in sorted(differences.items()))
    forced = (
        "these cannot change within a run, whatever resume says"
        if FIXED & differences.keys()
        else 'or resume="force", to change the settings of this run'
    )
    raise ConfigError(
        f"log_path must hold a run on the same rows and settings, got {str(folder)!r}, whose run "
        f'differs:{lines}\ngive another log_path; or resume="never", which moves that run aside '
        f"to {aside_path(folder)}; {forced}"
    )


def read_trained_on(folder: Path) -> TrainedOn | None:
    """What the run of a folder is trained on; None where it has not been kept.

    Raises:
        ConfigError: the file is damaged.
    """
    path = folder / TRAINED_ON
    if not path.exists():
        return None
    try:
        content = orjson.loads(path.read_bytes())
        if not is_intact(content):
            raise ValueError(f"its {CHECKSUM} is that of other content")
        return TrainedOn(**{name: content[name] for name in content if name != CHECKSUM})
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} must be what a run was started with, got a damaged file ({error}): repair it, "
            "or move it away to go on without a comparison"
        ) from None


def write_trained_on(folder: Path, trained_on: TrainedOn) -> None:
    """Replace ``folder/trained_on.json`` at once."""
    content = seal(asdict(trained_on))
    write_file(folder / TRAINED_ON, orjson.dumps(content, option=orjson.OPT_INDENT_2))


def _default_settings(config: RecipeConfig) -> dict[str, Any]:
    """What each setting of a config's type is where nobody gives it; required ones are left out."""
    defaults: dict[str, Any] = {}
    for setting in fields(config):
        if setting.default is not MISSING:
            defaults[setting.name] = setting.default
        elif setting.default_factory is not MISSING:
            value = setting.default_factory()
            defaults[setting.name] = plain_config(value) if is_dataclass(value) else value
    return dict(flatten(defaults))


def find_changed(config: RecipeConfig) -> dict[str, list[Any]]:
    """The settings that are not the recipe's defaults, as ``{"dapo.eps_clip": [0.2, 0.3]}``."""
    defaults = _default_settings(config)
    settings = dict(flatten(plain_config(config)))
    return {
        name: [defaults.get(name), value]
        for name, value in settings.items()
        if value != defaults.get(name)
    }


def _differences(
    before: TrainedOn, now: TrainedOn, defaults: Mapping[str, Any], rows: Sequence[Row]
) -> Iterator[tuple[str, str]]:
    """(name, both values) of what differs. A setting that an older version did not have yet
    counts as having had its default."""
    for name in before.settings.keys() | now.settings.keys():
        old = before.settings.get(name, defaults.get(name))
        new = now.settings.get(name)
        if old != new:
            yield name, f"{old!r} then, {new!r} now"
    if before.rows_sha256 != now.rows_sha256:
        shared = min(before.num_rows, len(rows))
        same = before.num_rows < len(rows) and hash_rows(rows[:shared]) == before.rows_sha256
        detail = f"the first {shared} are the same" if same else "with other content or order"
        yield "rows", f"{before.num_rows} then, {now.num_rows} now ({detail})"
