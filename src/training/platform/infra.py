"""What a loop trains with: policy, reference and deployment, provisioned and connected.

``setup_infra`` is the entry point for loops of your own, ``build_infra`` that of recipes. All
requests go out before anything is waited for, so trainers and deployment start side by side. Parts
that fail are collected into one error, and what was asked for is taken down.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hearth.errors import ConfigError
from hearth.sdk import (
    DeploymentManager,
    FiretitanTrainingClient,
    TrainerJobManager,
    TrainingShapeProfile,
)
from training.config.parts import DeployConfig, InfraConfig
from training.platform.cleanup import ResourceCleanup
from training.platform.client import ReconnectableClient, close_session, open_session
from training.platform.managers import own_deployments, own_trainers
from training.platform.provisioning import ProvisionedParts, Provisioner, deployment_config
from training.platform.spec import DCP_TIMEOUT_S, STEP_TIMEOUT_S, InfraSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Infra:
    """Connected clients and what they run on.

    ``policy`` and ``reference`` block until a call is done; the calls of ``policy_client`` and
    ``reference_client`` return futures. Both references are None when nothing asked for one;
    ``inference_model`` (what a sampler takes as its model) and ``deployment_id`` are None without
    inference. ``boot_metrics`` are seconds.
    """

    policy: ReconnectableClient
    policy_client: FiretitanTrainingClient
    reference: ReconnectableClient | None
    reference_client: FiretitanTrainingClient | None
    policy_profile: TrainingShapeProfile | None
    policy_job_id: str
    reference_job_id: str | None
    inference_model: str | None
    deployment_id: str | None
    deployment_shape: str | None
    training_shape_id: str | None
    ref_training_shape_id: str | None
    max_seq_len: int | None
    boot_metrics: dict[str, float] = field(default_factory=dict)
    closing: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def has_experts(self) -> bool:
        """Whether the policy is a mixture of experts that router replay can act on."""
        return self.policy_client.supports_router_replay

    def close(self) -> None:
        """Close the clients; the resources are ``ResourceCleanup``'s."""
        self.closing.close()


def setup_infra(
    *,
    rlor_mgr: TrainerJobManager,
    deploy_mgr: DeploymentManager | None = None,
    base_model: str,
    infra_cfg: InfraConfig | None = None,
    deploy_cfg: DeployConfig | None = None,
    lora_rank: int = 0,
    max_seq_len: int | None = None,
    learning_rate: float = 1e-5,
    step_timeout: float = STEP_TIMEOUT_S,
    dcp_timeout: float = DCP_TIMEOUT_S,
    policy_job_id: str | None = None,
    reference_job_id: str | None = None,
    needs_reference: bool = False,
    needs_inference: bool = True,
    role_prefix: str = "rl",
    job_suffix: str = "",
    api_key: str,
    cleanup: ResourceCleanup | None = None,
    on_status: Callable[[str], None] = logger.info,
    seed: int | None = None,
    extra_values: dict[str, Any] | None = None,
) -> Infra:
    """Provision and connect everything; the configs are not changed.

    A job or deployment that exists under the given (or derived) id is attached to instead of made.
    A full-parameter policy's reference is a trainer of its own, forward-only; a LoRA policy shares
    its frozen base weights, unless a reference shape or job id asks for a trainer. With
    ``PER_TRAINER`` (the default) the deployment reads the policy trainer's snapshots; with
    ``PER_DEPLOYMENT`` the policy trainer writes into the deployment's. ``job_suffix`` makes the ids
    of jobs and deployment repeat, so that the same run finds them again.

    ``cleanup`` takes down what was asked for here. Jobs given by id and a deployment that somebody
    else runs already go on running.

    Raises:
        ConfigError: inference without ``deploy_mgr`` or tokenizer, a job that does not fit, or two
            places for snapshots; nothing was asked for.
        EngineError: parts failed; each is named. Everything asked for is being taken down by
            ``cleanup``, or was if there is none.
    """
    spec = InfraSpec(
        base_model=base_model,
        infra=infra_cfg or InfraConfig(),
        deployment=deploy_cfg or DeployConfig(),
        lora_rank=lora_rank,
        max_seq_len=max_seq_len,
        learning_rate=learning_rate,
        step_timeout_s=step_timeout,
        dcp_timeout_s=dcp_timeout,
        policy_job_id=policy_job_id,
        reference_job_id=reference_job_id,
        needs_reference=needs_reference,
        needs_inference=needs_inference,
        role_prefix=role_prefix,
        job_suffix=job_suffix,
        seed=seed,
        trainer_options=extra_values or {},
    )
    deployments = None if deploy_mgr is None else own_deployments(deploy_mgr)
    return build_infra(spec, own_trainers(rlor_mgr), deployments, api_key, cleanup, on_status)


def build_infra(
    spec: InfraSpec,
    trainers: TrainerJobManager,
    deployments: DeploymentManager | None,
    api_key: str,
    cleanup: ResourceCleanup | None,
    on_status: Callable[[str], None],
) -> Infra:
    """Provision and connect what ``spec`` names, with managers of ours.

    Raises:
        ConfigError, EngineError: as ``setup_infra`` does.
    """
    if spec.needs_inference:
        if deployments is None:
            raise ConfigError("deploy_mgr must be given where needs_inference is True, got None")
        deployment_config(spec)  # judged before anything is asked for
    own_cleanup = cleanup or ResourceCleanup(trainers, deployments)
    started = time.perf_counter()
    try:
        parts = Provisioner(spec, trainers, deployments, own_cleanup).provision(on_status)
        provisioned = time.perf_counter()
        infra = _connect(spec, parts, trainers, api_key)
    except BaseException:
        if cleanup is None:
            own_cleanup.close()
        raise
    infra.boot_metrics["boot/provision_time"] = provisioned - started
    infra.boot_metrics["boot/wire_time"] = time.perf_counter() - provisioned
    if cleanup is not None:
        cleanup.callback("training clients", infra.close)
    return infra


def _connect(
    spec: InfraSpec, parts: ProvisionedParts, trainers: TrainerJobManager, api_key: str
) -> Infra:
    limits = {"timeout_s": spec.step_timeout_s, "dcp_timeout_s": spec.dcp_timeout_s}
    reference = reference_client = None
    with contextlib.ExitStack() as stack:
        session = open_session(trainers, parts.policy, api_key)
        stack.callback(close_session, session)
        policy_client = session.create_training_client(
            spec.base_model, spec.lora_rank, seed=spec.seed, replace=True, **spec.lora_options
        )
        policy = ReconnectableClient(
            policy_client, endpoint=parts.policy, session=session, **limits
        )
        stack.callback(policy.close)
        if spec.needs_reference:
            endpoint = parts.policy
            if parts.reference is not None:
                endpoint = parts.reference
                session = open_session(trainers, endpoint, api_key)
                stack.callback(close_session, session)
            reference_client = session.create_base_reference(spec.base_model)
            reference = ReconnectableClient(
                reference_client,
                endpoint=endpoint,
                session=session if parts.reference is not None else None,
                **limits,
            )
            stack.callback(reference.close)
        closing = stack.pop_all()
    deployment, shapes = parts.deployment, parts.shapes
    profile, ref_profile = shapes["policy"], shapes.get("reference")
    return Infra(
        policy=policy,
        policy_client=policy_client,
        reference=reference,
        reference_client=reference_client,
        policy_profile=profile,
        policy_job_id=parts.policy.job_id,
        reference_job_id=parts.reference.job_id if parts.reference is not None else None,
        inference_model=deployment.inference_model if deployment is not None else None,
        deployment_id=deployment.deployment_id if deployment is not None else None,
        deployment_shape=deployment.deployment_shape if deployment is not None else None,
        training_shape_id=profile.training_shape_id if profile is not None else None,
        ref_training_shape_id=ref_profile.training_shape_id if ref_profile is not None else None,
        max_seq_len=spec.max_seq_len or policy_client.max_seq_len,
        closing=closing,
    )
