"""A second deployment beside a run's own: a teacher, whose weights stay."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from hearth.errors import ConfigError
from hearth.sdk import DeploymentSampler
from training.config.parts import DeployConfig
from training.config.rl import RLConfig
from training.platform.provisioning import deployment_config, request_deployment
from training.platform.run_infra import RunInfra, load_tokenizer, make_sampler
from training.platform.spec import InfraSpec, make_up_id


def check_teacher(config: RLConfig, model: str, teacher: DeployConfig) -> None:
    """Judge a teacher before anything is started: it must read the student's tokens.

    Raises:
        ConfigError: its tokenizer cannot be loaded, or has another vocabulary.
    """
    own, other = (load_tokenizer(part) for part in (config.tokenizer_config, named(model, teacher)))
    if own.get_vocab() != other.get_vocab():
        raise ConfigError(
            f"teacher_model must have the tokenizer of base_model, got {model!r} with another "
            "vocabulary: it scores the token ids that the student has sampled"
        )


def named(model: str, teacher: DeployConfig) -> DeployConfig:
    """The teacher's deployment with its tokenizer, that of its model where none is named."""
    return replace(teacher, tokenizer_model=teacher.tokenizer_model or model)


@contextlib.contextmanager
def provision_teacher(
    config: RLConfig, infra: RunInfra, model: str, teacher: DeployConfig, max_concurrent: int
) -> Iterator[DeploymentSampler]:
    """The teacher's deployment, made or found, which answers; closed at the end of the ``with``.

    Raises:
        ConfigError: the deployment of that name serves another model.
        EngineError: it failed, with the platform's reason, or was not ready in time.
        HearthError: the platform refuses.
    """
    suffix = f"teacher-{InfraSpec.from_config(config).job_suffix}"
    options: dict[str, Any] = {"dtype": config.trainer.dtype, "device": config.trainer.device}
    deployment = replace(
        named(model, teacher), deployment_id=teacher.deployment_id or make_up_id(model, suffix)
    )
    spec = InfraSpec(
        base_model=model,
        deployment=deployment,
        max_seq_len=config.max_seq_len,
        job_suffix=suffix,
        trainer_options=options,
    )
    wanted = deployment_config(spec)
    info = request_deployment(
        infra.deployments, wanted, cleanup=infra.cleanup, is_own_id=teacher.deployment_id is None
    )
    info = infra.deployments.wait_for_ready(info.deployment_id, deployment.deployment_timeout_s)
    sampler = make_sampler(
        infra.inference_url,
        info.inference_model,
        infra.api_key,
        infra.tokenizer,
        deployment,
        max_concurrent,
    )
    with contextlib.closing(sampler):
        yield sampler
