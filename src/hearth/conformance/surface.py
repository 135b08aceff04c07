"""Every public method of every class of the installed client, called once.

Methods that end with ``_async`` are the same ones, to be awaited.
"""

from __future__ import annotations

import datetime
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import tinker
from tinker import types

from hearth.conformance.suite import Check, Server, get

_PROMPT = types.ModelInput.from_ints([20, 21, 22])
_ADAM = types.AdamParams(learning_rate=1e-3)


def find_methods() -> list[str]:
    """``Class.method`` of every public method of every client class."""
    found: list[str] = []
    for name, kind in inspect.getmembers(tinker, inspect.isclass):
        if name.endswith("Client"):
            methods = [each for each in dir(kind) if not each.startswith("_")]
            found += [f"{name}.{each}" for each in methods if not each.endswith("_async")]
    return found


def make_calls(server: Server) -> dict[str, Callable[[], Any]]:
    """How each method is called."""
    model, service = server.base_model, server.connect(server.key)
    rest = service.create_rest_client()
    training = get(service.create_lora_training_client(base_model=model, rank=4, seed=1))
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([5, 6, 7]),
        loss_fn_inputs={"target_tokens": types.TensorData.from_numpy(np.array([6, 7, 8]))},
    )
    run_id = training.get_info().model_id
    session_id = run_id.split(":")[0]
    state = get(training.save_state("state")).path
    weights = get(training.save_weights_for_sampler("weights")).path
    sampling = get(service.create_sampling_client(model_path=weights))

    def make_external() -> str:
        return str(get(training.save_weights_external("external")).path)

    def make_gone() -> str:
        return str(get(training.save_state("gone")).path)

    def delete() -> Any:
        make_gone()
        return rest.delete_checkpoint(run_id, "weights/gone")

    def loss(_: Any, logprobs: Any) -> Any:
        return -sum(values.sum() for values in logprobs), {}

    def per_datum(logprobs: Any, advantages: Any) -> Any:
        total = -(logprobs * advantages).sum()
        return total, {"custom/total:sum": total}

    def telemetry(client: Any) -> Callable[[], Any]:
        return lambda: client.get_telemetry()

    calls: dict[str, Callable[[], Any]] = {
        "ServiceClient.copy_weights": lambda: service.copy_weights(weights),
        "ServiceClient.create_custom_loss": lambda: service.create_custom_loss(
            per_datum, {"logprobs": 1, "advantages": 1}
        ),
        "ServiceClient.create_lora_training_client": lambda: service.create_lora_training_client(
            base_model=model, rank=2
        ),
        "ServiceClient.create_rest_client": service.create_rest_client,
        "ServiceClient.create_sampling_client": lambda: service.create_sampling_client(
            base_model=model
        ),
        "ServiceClient.create_training_client_from_state": (
            lambda: service.create_training_client_from_state(state)
        ),
        "ServiceClient.create_training_client_from_state_with_optimizer": (
            lambda: service.create_training_client_from_state_with_optimizer(state)
        ),
        "ServiceClient.get_console_url": lambda: service.get_console_url(),
        "ServiceClient.get_server_capabilities": lambda: service.get_server_capabilities(),
        "ServiceClient.get_telemetry": telemetry(service),
        "ServiceClient.holder": lambda: service.holder,
        "TrainingClient.create_sampling_client": lambda: training.create_sampling_client(weights),
        "TrainingClient.forward": lambda: training.forward([datum], "cross_entropy"),
        "TrainingClient.forward_backward": (
            lambda: training.forward_backward([datum], "cross_entropy")
        ),
        "TrainingClient.forward_backward_custom": (
            lambda: training.forward_backward_custom([datum], loss)
        ),
        "TrainingClient.get_console_url": lambda: training.get_console_url(),
        "TrainingClient.get_info": training.get_info,
        "TrainingClient.get_telemetry": telemetry(training),
        "TrainingClient.get_tokenizer": training.get_tokenizer,
        "TrainingClient.load_state": lambda: training.load_state(state),
        "TrainingClient.load_state_with_optimizer": (
            lambda: training.load_state_with_optimizer(state)
        ),
        "TrainingClient.optim_step": lambda: training.optim_step(_ADAM),
        "TrainingClient.save_state": lambda: training.save_state("again"),
        "TrainingClient.save_weights_and_get_sampling_client": (
            lambda: training.save_weights_and_get_sampling_client()
        ),
        "TrainingClient.save_weights_external": (
            lambda: training.save_weights_external("external-2")
        ),
        "TrainingClient.save_weights_for_sampler": (
            lambda: training.save_weights_for_sampler("weights-2")
        ),
        "SamplingClient.compute_logprobs": lambda: sampling.compute_logprobs(_PROMPT),
        "SamplingClient.create": lambda: None,  # makes a client from a holder of the package's own
        "SamplingClient.from_sampler_handle": lambda: type(sampling).from_sampler_handle(
            sampling.get_sampler_handle()
        ),
        "SamplingClient.get_base_model": sampling_base(sampling),
        "SamplingClient.get_sampler_handle": lambda: sampling.get_sampler_handle(),
        "SamplingClient.get_telemetry": telemetry(sampling),
        "SamplingClient.get_tokenizer": lambda: sampling.get_tokenizer(),
        "SamplingClient.on_queue_state_change": lambda: None,  # the package calls it
        "SamplingClient.sample": lambda: sampling.sample(
            _PROMPT, 1, types.SamplingParams(max_tokens=2)
        ),
        "RestClient.assign_session_project": (
            lambda: rest.assign_session_project(session_id, "project")
        ),
        "RestClient.copy_weights": lambda: rest.copy_weights(weights, "project"),
        "RestClient.delete_checkpoint": delete,
        "RestClient.delete_checkpoint_from_tinker_path": (
            lambda: rest.delete_checkpoint_from_tinker_path(make_gone())
        ),
        "RestClient.export_session_trace": lambda: rest.export_session_trace(session_id),
        "RestClient.get_audit_log": lambda: rest.get_audit_log(),
        "RestClient.get_billing_usage": lambda: rest.get_billing_usage(*_days()),
        "RestClient.get_current_checkpoint_storage_usage": (
            lambda: rest.get_current_checkpoint_storage_usage()
        ),
        "RestClient.get_external_weights_urls": lambda: rest.get_external_weights_urls(
            make_external()
        ),
        "RestClient.get_sampler": lambda: rest.get_sampler(
            get(rest.get_session(session_id)).sampler_ids[0]
        ),
        "RestClient.get_server_capabilities": lambda: rest.get_server_capabilities(),
        "RestClient.get_session": lambda: rest.get_session(session_id),
        "RestClient.get_telemetry": telemetry(rest),
        "RestClient.get_training_run": lambda: rest.get_training_run(run_id),
        "RestClient.get_training_run_by_tinker_path": (
            lambda: rest.get_training_run_by_tinker_path(state)
        ),
        "RestClient.get_weights_info_by_tinker_path": (
            lambda: rest.get_weights_info_by_tinker_path(state)
        ),
        "RestClient.list_checkpoints": lambda: rest.list_checkpoints(run_id),
        "RestClient.list_sessions": lambda: rest.list_sessions(),
        "RestClient.list_training_runs": lambda: rest.list_training_runs(),
        "RestClient.list_user_checkpoints": lambda: rest.list_user_checkpoints(),
        "RestClient.publish_checkpoint_from_tinker_path": (
            lambda: rest.publish_checkpoint_from_tinker_path(state)
        ),
        "RestClient.search_sessions": lambda: rest.search_sessions(types.SessionSearchRequest()),
        "RestClient.set_checkpoint_ttl_from_tinker_path": (
            lambda: rest.set_checkpoint_ttl_from_tinker_path(state, 3600)
        ),
        "RestClient.unpublish_checkpoint_from_tinker_path": (
            lambda: rest.unpublish_checkpoint_from_tinker_path(state)
        ),
        "RestClient.whoami": lambda: rest.whoami(),
    }
    if hasattr(tinker, "AdminClient"):
        admin = tinker.AdminClient(base_url=server.url, api_key=server.key)
        calls["AdminClient.get_audit_log"] = lambda: admin.get_audit_log()
        calls["AdminClient.get_billing_usage"] = lambda: admin.get_billing_usage(*_days())
        calls["AdminClient.get_current_checkpoint_storage_usage"] = lambda: (
            admin.get_current_checkpoint_storage_usage()
        )
        calls["AdminClient.get_telemetry"] = telemetry(admin)
    # A session ends last.
    calls["ServiceClient.close"] = lambda: service.close("success")
    return calls


def sampling_base(sampling: Any) -> Callable[[], Any]:
    """Asks a sampling client for its base model."""
    return lambda: sampling.get_base_model()


def _days() -> tuple[datetime.datetime, datetime.datetime]:
    today = datetime.datetime.now(datetime.UTC)
    return today - datetime.timedelta(days=1), today


def list_checks() -> list[Check]:
    """A check for each method; they share a run, a sampler and saved weights."""
    make_shared = cache(make_calls)
    called = dict.fromkeys(find_methods())
    # A session ends last.
    last = [name for name in called if name.endswith("ServiceClient.close")]

    def call(method: str) -> Callable[[Server], None]:
        def run(server: Server) -> None:
            calls = make_shared(server)
            assert method in calls, "the suite does not know this method yet"
            get(calls[method]())

        return run

    names = [*(name for name in called if name not in last), *last]
    return [Check("surface", name, call(name)) for name in names]
