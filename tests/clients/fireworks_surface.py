"""Calls every public method of the installed Fireworks client, and says what became of it.

    FIREWORKS_BASE_URL=... FIREWORKS_API_KEY=any \
        python -m tests.clients.fireworks_surface MODEL FOLDER RANK

MODEL is a model of the platform's catalog, FOLDER has its tokenizer, RANK is 0 for all weights.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import sys
from collections.abc import Callable
from typing import Any

import fireworks.training.sdk as sdk
import httpx
import tinker
from tests.clients.calls import Calls, find_methods, get, report

KINDS = (
    "FiretitanServiceClient",
    "FiretitanTrainingClient",
    "FiretitanSamplingClient",
    "FireworksClient",
    "TrainerJobManager",
    "DeploymentManager",
    "DeploymentSampler",
    "WeightSyncer",
)
"""The classes that talk to a platform; the package's other public classes are data, or local."""
REFUSES = {
    "FiretitanTrainingClient.forward_backward_contrastive",
    "FiretitanTrainingClient.forward_projection",
    "FiretitanTrainingClient.save_weights_and_get_sampling_client",
    "FiretitanTrainingClient.save_weights_and_get_sampling_client_submit",
    *(
        f"{client}.{method}"
        for client in ("FireworksClient", "TrainerJobManager")
        for method in (
            "list_training_job_checkpoints",
            "list_training_session_checkpoints",
            "promote_session_checkpoint",
            "promote_training_job_checkpoint",
        )
    ),
}
"""What is refused with a reason: embeddings, and Fireworks' managed SFT and DPO jobs and sessions.

The client itself refuses ``save_weights_and_get_sampling_client``. At rank 0 ``load_adapter`` is
refused, too.
"""
HAS_OWN_TYPES = hasattr(sdk, "Datum")
"""Older versions take the data types of the Tinker client."""
_TOKENS = [20, 21, 22]


def make_calls(model: str, folder: str, rank: int) -> Calls:
    """How each method is called; a platform must be at ``FIREWORKS_BASE_URL``."""
    import transformers

    url = os.environ["FIREWORKS_BASE_URL"]

    types = sdk if HAS_OWN_TYPES else tinker.types
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    shape = model.replace("/models/", "/trainingShapes/") + ("-lora" if rank else "")
    prompt = types.ModelInput.from_ints(_TOKENS)
    targets = types.TensorData(data=[21, 22, 23], dtype="int64", shape=[3])
    weights = types.TensorData(data=[1.0, 1.0, 1.0], dtype="float32", shape=[3])
    fields = {"target_tokens": targets, "weights": weights}
    datum = types.Datum(model_input=prompt, loss_fn_inputs=fields)
    loop = asyncio.new_event_loop()
    mark = secrets.token_hex(3)
    names = (f"name-{mark}-{number}" for number in itertools.count())

    service = sdk.FiretitanServiceClient.from_firetitan_config(
        base_model=model, lora_rank=rank, training_shape_id=shape, tokenizer_model=folder
    )
    training = service.create_training_client(base_model=model, lora_rank=rank)
    get(training.forward_backward([datum], "cross_entropy"))
    get(training.optim_step(types.AdamParams(learning_rate=1e-3)))
    state = get(training.save_state("state")).path
    sampler_weights = training.save_weights_for_sampler_ext("weights").snapshot_name
    sampling = service.create_sampling_client(model_path=sampler_weights)
    sampler = service.create_deployment_sampler(tokenizer=tokenizer)
    platform = {"api_key": os.environ["FIREWORKS_API_KEY"], "base_url": url}
    trainers, fireworks_client = sdk.TrainerJobManager(**platform), sdk.FireworksClient(**platform)
    deployments = sdk.DeploymentManager(**platform)
    job_id, deployment_id = service.trainer_job_id, service.deployment_id
    account = trainers.account_id
    job_name = f"accounts/{account}/rlorTrainerJobs/{job_id}"
    syncer = sdk.WeightSyncer(
        policy_client=training,
        deploy_mgr=deployments,
        deployment_id=deployment_id,
        base_model=model,
        lora_rank=rank,
        first_checkpoint_type="base",
    )

    def loss(_: Any, logprobs: Any) -> Any:
        return -sum(values.sum() for values in logprobs), {}

    def sample() -> Any:
        params = types.SamplingParams(max_tokens=2)
        return sampling.sample(prompt, 1, params)

    def trainer_config() -> Any:
        profile = trainers.resolve_training_profile(shape)
        return sdk.TrainerJobConfig(
            base_model=model, lora_rank=rank, training_shape_ref=profile.training_shape_version
        )

    def deployment_config() -> Any:
        return sdk.DeploymentConfig(
            deployment_id=next(names),
            base_model=model,
            deployment_shape=trainers.resolve_training_profile(shape).deployment_shape_version,
            min_replica_count=1,
        )

    def make_job() -> str:
        return str(trainers.create_and_wait(trainer_config()).job_id)

    def make_deployment() -> str:
        return str(deployments.create_or_get(deployment_config()).deployment_id)

    def resume_cancelled() -> Any:
        made = make_job()
        path = f"{url}/v1/accounts/{account}/rlorTrainerJobs/{made}:cancel"
        headers = {"authorization": f"Bearer {platform['api_key']}"}
        httpx.post(path, headers=headers, json={}).raise_for_status()
        return trainers.resume_and_wait(made)

    def in_a_loop(call: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: loop.run_until_complete(call())

    def make_sampling_client() -> Any:
        return type(sampling).create(
            inference_url=url,
            model=f"accounts/{account}/deployments/{deployment_id}",
            api_key=platform["api_key"],
            tokenizer=tokenizer,
        )

    def make_adapter() -> str:
        name = next(names)
        fireworks_client.promote_checkpoint(
            job_id=job_id, checkpoint_id=sampler_weights, output_model_id=name, base_model=model
        )
        return f"accounts/{account}/models/{name}"

    def promote(client: Any) -> Any:
        return client.promote_checkpoint(
            job_id=job_id,
            checkpoint_id=sampler_weights,
            output_model_id=next(names),
            base_model=model,
        )

    def promote_by_name(client: Any) -> Any:
        name = f"{job_name}/checkpoints/{sampler_weights}"
        return client.promote_training_job_checkpoint(name, next(names), model)

    def hotload(*, is_waited_for: bool) -> Any:
        call = deployments.hotload_and_wait if is_waited_for else deployments.hotload
        return call(deployment_id, model, sampler_weights)

    calls: dict[str, Callable[[], Any]] = {
        "FiretitanServiceClient.create_base_training_client": (
            # A client that manages its trainer itself has none.
            lambda: sdk.FiretitanServiceClient(
                **platform | {"base_url": trainers.wait_for_ready(job_id).base_url}
            ).create_base_training_client(model)
        ),
        "FiretitanServiceClient.create_deployment_sampler": (
            lambda: service.create_deployment_sampler(tokenizer=tokenizer)
        ),
        "FiretitanServiceClient.create_deployment_sampler_for_model": (
            lambda: service.create_deployment_sampler_for_model(model, tokenizer=tokenizer)
        ),
        "FiretitanServiceClient.create_inference_deployment_sampler": (
            lambda: service.create_inference_deployment_sampler(
                deployment_config(), tokenizer=tokenizer
            )
        ),
        "FiretitanServiceClient.create_lora_training_client": (
            lambda: service.create_lora_training_client(model, rank=rank)
        ),
        "FiretitanServiceClient.create_reference_client": (
            lambda: service.create_reference_client(model, lora_rank=rank)
        ),
        "FiretitanServiceClient.create_sampling_client": (
            lambda: service.create_sampling_client(model_path=sampler_weights)
        ),
        "FiretitanServiceClient.create_training_client": (
            lambda: service.create_training_client(base_model=model, lora_rank=rank)
        ),
        "FiretitanServiceClient.create_training_client_from_state": (
            lambda: service.create_training_client_from_state(state)
        ),
        "FiretitanServiceClient.create_training_client_from_state_with_optimizer": (
            lambda: service.create_training_client_from_state_with_optimizer(state)
        ),
        "FiretitanServiceClient.from_firetitan_config": (
            lambda: sdk.FiretitanServiceClient.from_firetitan_config(base_model=model)
        ),
        "FiretitanServiceClient.hotload_sampler_snapshot": (
            lambda: service.hotload_sampler_snapshot(sampler_weights)
        ),
        "FiretitanServiceClient.list_checkpoints": lambda: service.list_checkpoints(job_id),
        "FiretitanServiceClient.promote_checkpoint": lambda: promote(service),
        "FiretitanTrainingClient.create_base_training_client": (
            lambda: training.create_base_training_client(model)
        ),
        "FiretitanTrainingClient.create_sampling_client": (
            lambda: training.create_sampling_client(sampler_weights)
        ),
        "FiretitanTrainingClient.forward": lambda: training.forward([datum], "cross_entropy"),
        "FiretitanTrainingClient.forward_backward": (
            lambda: training.forward_backward([datum], "cross_entropy")
        ),
        "FiretitanTrainingClient.forward_backward_contrastive": (
            lambda: training.forward_backward_contrastive(
                [datum, datum], num_queries=1, temperature=1.0
            )
        ),
        "FiretitanTrainingClient.forward_backward_custom": (
            lambda: training.forward_backward_custom([datum], loss)
        ),
        "FiretitanTrainingClient.forward_projection": lambda: training.forward_projection([datum]),
        "FiretitanTrainingClient.load_adapter": lambda: training.load_adapter(make_adapter()),
        "FiretitanTrainingClient.load_state": lambda: training.load_state(state),
        "FiretitanTrainingClient.load_state_with_optimizer": (
            lambda: training.load_state_with_optimizer(state)
        ),
        "FiretitanTrainingClient.optim_step": (
            lambda: training.optim_step(types.AdamParams(learning_rate=1e-3))
        ),
        "FiretitanTrainingClient.resolve_checkpoint_path": (
            lambda: training.resolve_checkpoint_path(state)
        ),
        "FiretitanTrainingClient.save_state": lambda: training.save_state(next(names)),
        "FiretitanTrainingClient.weight_sync": lambda: training.weight_sync(),
        "FiretitanTrainingClient.save_weights_and_get_sampling_client": (
            lambda: training.save_weights_and_get_sampling_client()
        ),
        "FiretitanTrainingClient.save_weights_and_get_sampling_client_submit": (
            lambda: training.save_weights_and_get_sampling_client_submit()
        ),
        "FiretitanTrainingClient.save_weights_for_sampler": (
            lambda: training.save_weights_for_sampler(next(names))
        ),
        "FiretitanTrainingClient.save_weights_for_sampler_ext": (
            lambda: training.save_weights_for_sampler_ext(next(names))
        ),
        "FiretitanSamplingClient.compute_logprobs": lambda: sampling.compute_logprobs(prompt),
        "FiretitanSamplingClient.create": make_sampling_client,
        "FiretitanSamplingClient.from_sampler_handle": lambda: type(sampling).from_sampler_handle(
            sampling.get_sampler_handle(), api_key=platform["api_key"], tokenizer=tokenizer
        ),
        "FiretitanSamplingClient.get_tokenizer": lambda: make_sampling_client().get_tokenizer(),
        "FiretitanSamplingClient.on_queue_state_change": lambda: None,  # the package calls it
        "FiretitanSamplingClient.sample": sample,
        "DeploymentManager.create_or_get": make_deployment,
        "DeploymentManager.get": lambda: deployments.get(deployment_id),
        "DeploymentManager.hotload": lambda: hotload(is_waited_for=False),
        "DeploymentManager.hotload_and_wait": lambda: hotload(is_waited_for=True),
        "DeploymentManager.hotload_check_status": (
            lambda: deployments.hotload_check_status(deployment_id, model)
        ),
        "DeploymentManager.reattach_trainer": lambda: deployments.reattach_trainer(
            deployment_id, base_model=model, trainer_job_name=job_name, timeout_s=60
        ),
        "DeploymentManager.scale_to_zero": lambda: deployments.scale_to_zero(make_deployment()),
        "DeploymentManager.update": lambda: deployments.update(
            make_deployment(), {"maxReplicaCount": 1}, "max_replica_count"
        ),
        "DeploymentManager.wait_for_hotload": (
            lambda: deployments.wait_for_hotload(deployment_id, model, sampler_weights)
        ),
        "DeploymentManager.wait_for_ready": lambda: deployments.wait_for_ready(make_deployment()),
        "DeploymentManager.warmup": (
            lambda: deployments.warmup(f"accounts/{account}/deployments/{deployment_id}")
        ),
        "DeploymentManager.delete": lambda: deployments.delete(make_deployment()),
        "DeploymentSampler.async_completions_stream": in_a_loop(
            lambda: sampler.async_completions_stream(_TOKENS, max_tokens=2)
        ),
        "DeploymentSampler.negotiate_routing_matrix_format": lambda: (
            None
        ),  # for mixtures of experts
        "DeploymentSampler.sample_with_prompt_tokens": in_a_loop(
            lambda: sampler.sample_with_prompt_tokens(_TOKENS, max_tokens=2)
        ),
        "DeploymentSampler.sample_with_prompt_tokens_result": in_a_loop(
            lambda: sampler.sample_with_prompt_tokens_result(_TOKENS, max_tokens=2)
        ),
        "DeploymentSampler.sample_with_tokens": in_a_loop(
            lambda: sampler.sample_with_tokens([{"role": "user", "content": "1"}], max_tokens=2)
        ),
        "WeightSyncer.save_only": lambda: syncer.save_only(next(names)),
        "WeightSyncer.save_and_hotload": lambda: syncer.save_and_hotload(next(names)),
        "WeightSyncer.hotload": lambda: syncer.hotload(sampler_weights, "base"),
        "WeightSyncer.get_deployment_sampler": lambda: syncer.get_deployment_sampler(tokenizer),
        "WeightSyncer.get_sampling_client": lambda: syncer.get_sampling_client(tokenizer),
        "TrainerJobManager.create": lambda: trainers.create(trainer_config()),
        "TrainerJobManager.create_and_wait": lambda: trainers.create_and_wait(trainer_config()),
        "TrainerJobManager.delete": lambda: trainers.delete(make_job()),
        "TrainerJobManager.get": lambda: trainers.get(job_id),
        "TrainerJobManager.try_get": lambda: trainers.try_get(job_id),
        "TrainerJobManager.reconnect_and_wait": lambda: trainers.reconnect_and_wait(job_id),
        "TrainerJobManager.resume_and_wait": resume_cancelled,
        "TrainerJobManager.wait_for_existing": lambda: trainers.wait_for_existing(job_id),
        "TrainerJobManager.wait_for_ready": lambda: trainers.wait_for_ready(job_id),
    }
    # Methods without arguments, which a version may lack.
    for client, methods in (
        (
            service,
            (
                "create_rest_client",
                "delete_training_session",
                "get_server_capabilities",
                "get_telemetry",
                "release_references",
                "requires_initial_sampler_sync",
            ),
        ),
        (training, ("get_info", "get_telemetry", "get_tokenizer", "list_checkpoints")),
        (sampling, ("get_base_model", "get_sampler_handle", "get_telemetry")),
        (sampler, ("drain_metrics",)),
        (syncer, ("check_deployment_state", "wait_for_hotload_ready", "reset_delta_chain")),
    ):
        calls |= {
            f"{type(client).__name__}.{method}": lambda client=client, method=method: getattr(
                client, method
            )()
            for method in methods
        }
    for client in (fireworks_client, trainers):
        name = type(client).__name__
        calls |= {
            f"{name}.list_checkpoints": lambda client=client: client.list_checkpoints(job_id),
            f"{name}.list_training_job_checkpoints": (
                lambda client=client: client.list_training_job_checkpoints(job_name)
            ),
            f"{name}.model_is_moe": lambda client=client: client.model_is_moe(model),
            f"{name}.promote_checkpoint": lambda client=client: promote(client),
            f"{name}.promote_training_job_checkpoint": (
                lambda client=client: promote_by_name(client)
            ),
            f"{name}.resolve_training_profile": (
                lambda client=client: client.resolve_training_profile(shape)
            ),
            f"{name}.delete_training_session": (
                lambda client=client: client.delete_training_session(
                    "accounts/me/trainingSessions/s"
                )
            ),
            f"{name}.list_training_session_checkpoints": lambda client=client: (
                client.list_training_session_checkpoints("accounts/me/trainingSessions/s")
            ),
            f"{name}.promote_session_checkpoint": (
                lambda client=client: client.promote_session_checkpoint(
                    "accounts/me/trainingSessions/s/checkpoints/c", next(names), model
                )
            ),
        }
    # What each object is asked last: its end.
    ends = [training, sampling, sampler, deployments, fireworks_client, trainers, service]
    if hasattr(training, "unload_model"):
        calls["FiretitanTrainingClient.unload_model"] = training.unload_model
    calls |= {f"{type(each).__name__}.close": each.close for each in ends if hasattr(each, "close")}
    return calls


def main() -> int:
    """Call them all; the exit code says whether each was answered, or refused as it should be."""
    kinds = [getattr(sdk, name) for name in KINDS if hasattr(sdk, name)]
    methods = [
        f"{kind.__name__}.{name}"
        for kind in kinds
        for name in (found.split(".")[1] for found in find_methods([kind]))
        if callable(getattr(kind, name))
    ]
    model, folder, rank = sys.argv[1:4]
    calls = make_calls(model, folder, int(rank))
    refuses = REFUSES | ({"FiretitanTrainingClient.load_adapter"} if rank == "0" else set())
    failed = sdk.RequestFailedError if HAS_OWN_TYPES else tinker.RequestFailedError
    refusals = (ValueError, RuntimeError, NotImplementedError, failed)
    return report(calls, methods, refuses, refusals)


if __name__ == "__main__":
    sys.exit(main())
