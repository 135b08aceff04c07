"""A run's numbers against the same model in float64, computed here by transformers and PEFT.

The server is only asked for what it saved: adapters before and after a step are downloaded.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
from numpy.typing import NDArray
from tinker import types

from hearth.conformance.suite import (
    Check,
    Server,
    SkipError,
    difference,
    get,
    make_data,
    read_field,
    score,
    train,
)

if TYPE_CHECKING:
    import tinker
    from torch import Tensor

_LOGPROB = 1e-3
"""How far float32 may be from float64."""
_RATE = 1e-3
_SETTINGS = types.AdamParams(
    learning_rate=_RATE, beta1=0.0, beta2=0.0, eps=1e-3, weight_decay=0.5, grad_clip_norm=0.1
)
"""Without memory a step is a formula of one gradient."""


def _require_reference(server: Server) -> Path:
    if server.reference is None:
        raise SkipError("needs --reference, a folder with the weights of the base model")
    return server.reference


def _load(folder: Path, adapter: Path | None = None) -> Any:
    # Only these checks need them, and they take seconds.
    import peft
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    if adapter is None:
        return model.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = peft.PeftModel.from_pretrained(model, adapter, is_trainable=True)
    # What it adds to the model has a dtype of its own.
    return loaded.double().eval()


def _score_here(model: Any, data: Sequence[types.Datum]) -> Tensor:
    """Logprobs of all targets, with their graph."""
    import torch

    parts: list[Tensor] = []
    for datum in data:
        ids = torch.tensor([datum.model_input.to_ints()])
        targets = torch.tensor(read_field(datum, "target_tokens")).long()
        rows = model(input_ids=ids).logits[0].log_softmax(-1)
        parts.append(rows.gather(1, targets[:, None])[:, 0])
    return torch.cat(parts)


def _as_array(values: Tensor) -> NDArray[np.float64]:
    return np.asarray(values.detach().numpy(), dtype=np.float64)


def _download(server: Server, client: tinker.TrainingClient, name: str, folder: Path) -> Path:
    """The adapter that a run has now, as PEFT's two files."""
    path = get(client.save_weights_external(name)).path
    rest = server.service.create_rest_client()
    target = folder / name
    target.mkdir()
    for file, url in get(rest.get_external_weights_urls(path)).urls.items():
        content = httpx.get(url, timeout=60).raise_for_status().content
        (target / Path(file).name).write_bytes(content)
    return target


def _check_base(server: Server) -> str:
    model = _load(_require_reference(server))
    data = make_data(30)
    worst = difference(score(server.begin(), data), _as_array(_score_here(model, data)))
    prompt = data[0].model_input
    own = np.asarray(get(server.sampler().compute_logprobs(prompt))[1:])
    tokens = prompt.to_ints()
    shifted = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": types.TensorData.from_numpy(np.asarray(tokens[1:]))},
    )
    worst = max(worst, difference(own, _as_array(_score_here(model, [shifted]))))
    assert worst <= _LOGPROB, f"logprobs differ from float64 by {worst:.2g}"
    return f"largest difference {worst:.2g}"


def _check_adapter(server: Server) -> str:
    folder = _require_reference(server)
    # PEFT warns of adapters on a tied head, and loads them otherwise than they were trained.
    client, data = server.begin(train_unembed=False), make_data(31)
    train(client, 31)
    with tempfile.TemporaryDirectory() as work:
        model = _load(folder, _download(server, client, "trained", Path(work)))
    worst = difference(score(client, data), _as_array(_score_here(model, data)))
    assert worst <= _LOGPROB, f"the downloaded adapter's logprobs differ by {worst:.2g}"
    return f"largest difference {worst:.2g}"


def _check_step(server: Server) -> str:
    forgetful = types.AdamParams(learning_rate=_RATE, beta1=0.0, beta2=0.0)
    return _compare_signs(*_step(server, forgetful))


def _check_settings(server: Server) -> str:
    before, after, gradients = _step(server, _SETTINGS)
    norm = float(np.sqrt(sum(float((each**2).sum()) for each in gradients.values())))
    assert norm > _SETTINGS.grad_clip_norm, f"the gradient must be clipped, got a norm of {norm}"
    share, worst = _SETTINGS.grad_clip_norm / norm, 0.0
    old, new = dict(before.named_parameters()), dict(after.named_parameters())
    for name, gradient in gradients.items():
        clipped, weight = share * gradient, _as_array(old[name])
        step = clipped / (np.abs(clipped) + _SETTINGS.eps) + _SETTINGS.weight_decay * weight
        error = np.abs(_as_array(new[name]) - weight + _RATE * step)
        worst = max(worst, float(error.max() / np.abs(_RATE * step).max()))
    assert worst <= 0.01, f"weights moved otherwise than by the formula, by {100 * worst:.2g} %"
    return f"largest difference {100 * worst:.2g} % of the largest move"


def _step(
    server: Server, adam: types.AdamParams
) -> tuple[Any, Any, dict[str, NDArray[np.float64]]]:
    """A run's model before and after a step, and the step's gradient in float64."""
    folder = _require_reference(server)
    client, data = server.begin(train_unembed=False), make_data(32)
    # One factor of a new adapter is zero, and the other has no gradient before it moves.
    get(client.forward_backward(make_data(33), "cross_entropy"))
    get(client.optim_step(types.AdamParams(learning_rate=_RATE, beta1=0.0, beta2=0.0)))
    with tempfile.TemporaryDirectory() as work:
        before = _load(folder, _download(server, client, "before", Path(work)))
        gradients = _gradients(before, data)
        get(client.forward_backward(data[:1], "cross_entropy"))
        get(client.forward_backward(data[1:], "cross_entropy"))
        get(client.optim_step(adam))
        after = _load(folder, _download(server, client, "after", Path(work)))
    return before, after, gradients


def _gradients(model: Any, data: Sequence[types.Datum]) -> dict[str, NDArray[np.float64]]:
    (-_score_here(model, data).sum()).backward()
    named = model.named_parameters()
    return {name: _as_array(value.grad) for name, value in named if value.grad is not None}


def _compare_signs(before: Any, after: Any, gradients: dict[str, NDArray[np.float64]]) -> str:
    """A step of Adam without memory moves each weight by the rate, against its gradient's sign."""
    old, new = dict(before.named_parameters()), dict(after.named_parameters())
    agree = total = 0
    for name, gradient in gradients.items():
        moved = _as_array(new[name]) - _as_array(old[name])
        # The sign of what is next to nothing is a matter of rounding.
        clear = np.abs(gradient) > 1e-3 * np.abs(gradient).max(initial=0.0)
        expected = -_RATE * np.sign(gradient)
        agree += int((np.abs(moved - expected)[clear] <= 0.01 * _RATE).sum())
        total += int(clear.sum())
    share = agree / max(1, total)
    assert share >= 0.999, f"{100 * share:.2f} % of {total} weights moved as float64 says"
    return f"{100 * share:.2f} % of {total} weights moved as float64 says"


CHECKS = [
    Check("numbers", name, run)
    for name, run in (
        ("the base model's logprobs are float64's", _check_base),
        ("a downloaded adapter has the run's logprobs", _check_adapter),
        ("a step moves the weights as float64 says", _check_step),
        ("clipping, eps and decay of a step are to the letter", _check_settings),
    )
]
