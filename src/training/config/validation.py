"""Checks that need no model: every rule of a recipe's config, each broken one as one line."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hearth.errors import ConfigError
from hearth.losses.catalog import POLICY_LOSSES
from training.config.objective import objective_options, tis_options
from training.config.parts import LoraTarget, Tracker, read_share
from training.config.recipe import RecipeConfig
from training.config.rl import RLConfig
from training.config.single_turn import SingleTurnConfig

WITHOUT_KERNEL = frozenset({"reinforce", "cispo_mask"})
"""Losses that the trainer cannot compute itself."""
_PLAIN: dict[type, tuple[type, str]] = {
    bool: (bool, "True or False"),
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    str: (str, "a text"),
}
"""What a value of a plain type must be an instance of, numbers of numpy too, and its name."""
_MODEL_ID = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


def validate(config: RecipeConfig, own: Iterable[str] = ()) -> None:
    """Check everything that can be checked without loading a model.

    ``own`` are the problems of settings that only this recipe has; they are looked for where all
    values are of their types.

    Raises:
        ConfigError: one line per problem.
    """
    wrong = [
        (name, value, kind) for name, value, kind in _list_values(config) if not _is_of(value, kind)
    ]
    problems = [f"{name} must be {_describe(kind)}, got {value!r}" for name, value, kind in wrong]
    if all(_choices(kind) for _, _, kind in wrong):  # else the rules cannot compare the values
        # An objective's own check may find again what its field's type has told.
        problems = list(dict.fromkeys([*problems, *_problems(config), *own]))
    if len(problems) == 1:
        raise ConfigError(problems[0])
    if problems:
        lines = "".join(f"\n  - {problem}" for problem in problems)
        raise ConfigError(f"the config has {len(problems)} problems:{lines}")


def counts_below_one(config: object, *names: str) -> Iterator[str]:
    """A problem for each field that must be at least 1 and is not."""
    for name in names:
        value: int = getattr(config, name)
        if value < 1:
            yield f"{name} must be >= 1, got {value}"


def _list_values(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Name, value and type of each field, and of those of the records among them."""
    kinds = get_type_hints(type(config))
    for name in (field.name for field in fields(config)):
        value = getattr(config, name)
        yield f"{prefix}{name}", value, kinds[name]
        if is_dataclass(value) and not isinstance(value, type):
            yield from _list_values(value, f"{prefix}{name}.")


def _is_of(value: object, kind: Any) -> bool:
    """Whether a value is of a field's type; lists and mappings are not looked into."""
    if choices := _choices(kind):
        return value in choices
    if get_origin(kind) in (Union, UnionType):
        return any(_is_of(value, member) for member in get_args(kind))
    if kind in _PLAIN:
        return isinstance(value, _PLAIN[kind][0]) and isinstance(value, bool) == (kind is bool)
    if isinstance(kind, type) and (is_dataclass(kind) or kind is NoneType):
        return isinstance(value, kind)
    return True


def _describe(kind: Any) -> str:
    """A field's type in words."""
    if choices := _choices(kind):
        return f"one of {choices}"
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(map(_describe, get_args(kind)))
    if kind is NoneType:
        return "None"
    return _PLAIN[kind][1] if kind in _PLAIN else f"of type {getattr(kind, '__name__', kind)}"


def _choices(kind: Any) -> list[Any]:
    """All values of a type of literals, an enumeration, or one of these or None; [] for others."""
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return [member.value for member in kind]
    members = get_args(kind) if get_origin(kind) in (Union, UnionType) else ()
    known = [[None] if member is NoneType else _choices(member) for member in members]
    return [choice for choices in known for choice in choices] if all(known) else []


def _problems(config: RecipeConfig) -> Iterator[str]:
    if not config.base_model:
        yield "base_model must be a registered name, a folder or a hub id, got ''"
    if not config.tokenizer_config.tokenizer_model:
        part = "deployment" if config.needs_inference else "tokenizer"
        yield (
            f"{part}.tokenizer_model must be a tokenizer's folder or hub id where base_model is "
            f"a registered name, got '' for {config.base_model!r}: prompts are tokenized on the "
            "client"
        )
    yield from _row_problems(config)
    yield from _optimizer_problems(config)
    yield from _adapter_problems(config)
    yield from _sync_problems(config)
    if isinstance(config, RLConfig):
        yield from _rl_problems(config)
    if config.output_model_id is not None and not _MODEL_ID.fullmatch(config.output_model_id):
        yield (
            "output_model_id must be 1 to 63 characters of a-z, 0-9 and -, got "
            f"{config.output_model_id!r}"
        )
    if config.resume.mode == "never" and config.resume.resume_from is not None:
        yield (
            f"resume.resume_from must be unset with resume.mode='never', got "
            f"{config.resume.resume_from!r}: the run starts anew"
        )
    if config.init_from_checkpoint and config.warm_start_from_adapter:
        yield (
            "init_from_checkpoint and warm_start_from_adapter must not both be given, got "
            f"{config.init_from_checkpoint!r} and {config.warm_start_from_adapter!r}: a checkpoint "
            "has its adapter"
        )
    if not all(_is_of(name, Tracker) for name in config.trackers):
        yield f"report_to must be {_describe(Tracker)} or a list of them, got {config.report_to!r}"
    yield from _platform_problems(config)
    if config.keep_checkpoints is not None and config.keep_checkpoints < 1:
        yield f"keep_checkpoints must be >= 1 or None, got {config.keep_checkpoints}"


def _platform_problems(config: RecipeConfig) -> Iterator[str]:
    parts: list[tuple[str, Any]] = [("trainer", config.trainer)]
    counts = {"trainer": ("ranks", "micro_batch_tokens")}
    times = {"trainer": ("timeout_s",)}
    if isinstance(config, RLConfig):
        parts += [("infra", config.infra), ("deployment", config.deployment)]
        counts["deployment"] = ("max_batch_size", "replicas")
        times |= {
            "infra": ("trainer_timeout_s",),
            "deployment": ("deployment_timeout_s", "sample_timeout"),
        }
    for part, settings in parts:
        for name in counts.get(part, ()):
            count = getattr(settings, name)
            if count is not None and count < 1:
                yield f"{part}.{name} must be >= 1, got {count}"
        for name in times[part]:
            if not (seconds := getattr(settings, name)) > 0:
                yield f"{part}.{name} must be > 0 seconds, got {seconds}"


def _rl_problems(config: RLConfig) -> Iterator[str]:
    yield from _group_problems(config)
    yield from _number_problems(config)
    yield from _loss_problems(config)
    yield from _kl_target_problems(config)
    yield from _batching_problems(config)
    if config.runs_builtin_loss:
        yield from _builtin_loss_problems(config)
    if isinstance(config, SingleTurnConfig):
        yield from _reward_problems(config)
    for name in ("accelerator_count", "node_count", "trainer_replica_count"):
        count: int | None = getattr(config.infra, name)
        if count is not None and count != 1:
            yield (
                f"infra.{name} must be 1 or None, got {count}: a trainer is one process, or as "
                "many as trainer.ranks says"
            )


def _group_problems(config: RLConfig) -> Iterator[str]:
    if config.completions_per_prompt < config.least_completions == 2:
        yield (
            f"completions_per_prompt must be >= 2, got {config.completions_per_prompt}: GRPO "
            "centers rewards within a group, and one answer has no spread"
        )
    yield from counts_below_one(
        config,
        *(["completions_per_prompt"] if config.least_completions == 1 else []),
        "prompt_groups_per_step",
        "max_completion_tokens",
        "ppo_n_minibatches",
        "eval_samples_per_prompt",
    )
    try:
        read_share(config.record_samples)
    except ConfigError as error:
        yield str(error)
    if config.no_signal_patience is not None and config.no_signal_patience < 1:
        yield f"no_signal_patience must be >= 1 or None, got {config.no_signal_patience}"


def _row_problems(config: RecipeConfig) -> Iterator[str]:
    yield from counts_below_one(config, "epochs")
    if config.eval_rows < (0 if config.eval_dataset is None else 1):
        yield f"eval_rows must be >= 1, got {config.eval_rows}"
    if config.max_rows is not None and config.max_rows < 1:
        yield f"max_rows must be >= 1 or None, got {config.max_rows}"
    if config.eval_every < 0:
        yield f"eval_every must be >= 0, got {config.eval_every}"
    if config.max_seq_len < 2:
        yield f"max_seq_len must be >= 2, got {config.max_seq_len}"


def _adapter_problems(config: RecipeConfig) -> Iterator[str]:
    if config.lora_rank < 0:
        yield f"lora_rank must be >= 0, got {config.lora_rank}"
    if not (math.isfinite(config.lora_alpha) and config.lora_alpha > 0):
        yield f"lora_alpha must be > 0, got {config.lora_alpha}"
    known = get_args(LoraTarget)
    if not config.lora_targets or not set(config.lora_targets) <= set(known):
        yield f"lora_targets must be one or more of {list(known)}, got {config.lora_targets}"
    for name in ("warm_start_from_adapter", "merge_adapter"):
        if getattr(config, name) and config.lora_rank == 0:
            yield f"lora_rank must be > 0 where {name} is given, got 0"
    kind = config.sync.first_checkpoint_type
    if kind == "merged_base" and config.lora_rank == 0:
        yield "lora_rank must be > 0 where first_checkpoint_type is 'merged_base', got 0"
    if kind == "direct" and config.lora_rank > 0:
        yield (
            "first_checkpoint_type must be 'base' or 'merged_base' for an adapter, got "
            "'direct': an adapter is small, and is sent by files"
        )


def _optimizer_problems(config: RecipeConfig) -> Iterator[str]:
    yield from _not_positive(config, "learning_rate", "eps")
    yield from _negative(config, "weight_decay", "grad_clip_norm", "warmup_steps")
    for name in ("beta1", "beta2"):
        value = getattr(config, name)
        if not 0 <= value < 1:
            yield f"{name} must lie in [0, 1), got {value}"


def _number_problems(config: RLConfig) -> Iterator[str]:
    yield from _not_positive(config, "temperature", "parity_threshold", "record_max_gb")
    yield from _negative(config, "kl_beta", "eps_clip")
    if config.eps_clip_high is not None and not config.eps_clip_high >= 0:
        yield f"eps_clip_high must be >= 0, got {config.eps_clip_high}"


def _not_positive(config: RecipeConfig, *names: str) -> Iterator[str]:
    for name in names:
        value: float = getattr(config, name)
        if not (math.isfinite(value) and value > 0):
            yield f"{name} must be > 0, got {value}"


def _negative(config: RecipeConfig, *names: str) -> Iterator[str]:
    for name in names:
        value: float = getattr(config, name)
        if not (math.isfinite(value) and value >= 0):
            yield f"{name} must be >= 0, got {value}"


def _loss_problems(config: RLConfig) -> Iterator[str]:
    known = [*POLICY_LOSSES, "cispo_mask"]
    if config.policy_loss not in known:
        yield f"policy_loss must be one of {known}, got {config.policy_loss!r}"
        return
    for name in ("ratio_min", "ratio_max"):
        value = getattr(config, name)
        if value is not None and config.policy_loss != "importance_sampling":
            yield (
                f"{name} must be None with policy_loss={config.policy_loss!r}, got {value}: it "
                "bounds the ratio of importance_sampling alone"
            )
    objective, tis = objective_options(config), tis_options(config)
    try:
        objective.validate()
    except ConfigError as error:
        problem = str(error).removeprefix(f"{type(objective).__name__}.")
        # The options of dapo, gspo, cispo and dro are a record of their own.
        yield f"{config.policy_loss}.{problem}" if hasattr(config, config.policy_loss) else problem
    try:
        if tis is not None:
            tis.validate()
    except ConfigError as error:
        yield str(error)


def _kl_target_problems(config: RLConfig) -> Iterator[str]:
    target, loss = config.kl_target, POLICY_LOSSES.get(config.policy_loss)
    if target is None:
        return
    if not (math.isfinite(target) and target > 0):
        yield f"kl_target must be > 0 or None, got {target}"
    if loss is not None and not loss.has_kl:
        able = [name for name, loss_kind in POLICY_LOSSES.items() if loss_kind.has_kl]
        yield (
            f"policy_loss must be one of {able} with kl_target, got {loss.name!r}: it has no KL "
            "whose weight could be adapted"
        )
    if config.kl_beta == 0:
        yield "kl_beta must be > 0 with kl_target, got 0: it is what the weight starts from"


def _batching_problems(config: RLConfig) -> Iterator[str]:
    least, most = config.min_samples_per_fwd_bwd, config.max_samples_per_fwd_bwd
    yield from counts_below_one(config, "max_samples_per_fwd_bwd")
    if least is not None and not 1 <= least <= most:
        yield (
            "min_samples_per_fwd_bwd must lie between 1 and max_samples_per_fwd_bwd "
            f"({most}), got {least}"
        )
    if config.ppo_n_minibatches > 1 and least is not None:
        yield (
            "min_samples_per_fwd_bwd must be None with ppo_n_minibatches > 1, got "
            f"{least}: minibatches need the whole batch first"
        )


def _sync_problems(config: RecipeConfig) -> Iterator[str]:
    try:
        sync = config.sync
    except ConfigError as error:
        yield str(error)
        return
    if sync.interval < 0:
        yield f"weight_sync_interval must be >= 0, got {sync.interval}: 0 never syncs"
    if sync.dcp_save_interval < 0:
        yield f"dcp_save_interval must be >= 0, got {sync.dcp_save_interval}: 0 saves nothing"
    for name, value in (
        ("weight_sync_timeout", sync.timeout_s),
        ("dcp_timeout", sync.dcp_timeout_s),
    ):
        if not value > 0:
            yield f"{name} must be > 0 seconds, got {value}"


def _builtin_loss_problems(config: RLConfig) -> Iterator[str]:
    if config.kl_beta > 0:
        yield (
            f"kl_beta must be 0 with loss_path='builtin', got {config.kl_beta}: the trainer's "
            "built-in losses have no KL; set kl_beta=0 or loss_path='client'"
        )
    if config.policy_loss in WITHOUT_KERNEL:
        yield (
            f"policy_loss must have a built-in kernel with loss_path='builtin', got "
            f"{config.policy_loss!r}: use loss_path='client'"
        )
    if config.policy_loss == "dro" and config.dro.gated:
        yield "dro.gated must be False with loss_path='builtin', got True: use 'client'"
    for name in ("ratio_min", "ratio_max"):
        if getattr(config, name) is not None:
            yield (
                f"{name} must be None with loss_path='builtin', got {getattr(config, name)}: the "
                "built-in kernel has no such bound; use loss_path='client'"
            )


def _reward_problems(config: SingleTurnConfig) -> Iterator[str]:
    yield from counts_below_one(config, "max_concurrent")
    if config.reward_timeout_s is not None and not config.reward_timeout_s > 0:
        yield f"reward_timeout_s must be > 0 seconds or None, got {config.reward_timeout_s}"
    older = config.rollout_workers
    if older is not None and config.reward_workers not in ("loop", older):
        yield (
            f"reward_workers and rollout_workers must agree, got {config.reward_workers!r} and "
            f"{older!r}: they are two names of one setting, give reward_workers"
        )
    workers = older or config.reward_workers
    if workers != "loop" and config.reward_timeout_s is None:
        yield (
            f"reward_timeout_s must be given with reward_workers={workers!r}, got None: the run "
            "would wait forever for a call that never ends"
        )
