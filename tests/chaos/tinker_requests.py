"""A run and a sampler over Tinker's API, and valid requests about them."""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

import httpx
import numpy as np
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.types.forward_backward_input import ForwardBackwardInput
from tinker.types.forward_backward_request import ForwardBackwardRequest

from training.quickstart import MODEL

ROOT = "/api/v1"
PROTOBUF = "application/x-protobuf"
PENDING = 408


class TinkerRun:
    """A session with a run and a sampler; ``begin`` makes them anew and ends the older ones."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http
        self._numbers = itertools.count(1)
        self.session = self.run = self.sampler = ""
        self.sequence = 0
        """The number of the last operation."""
        self.begin()

    def begin(self) -> None:
        """End the session, and open another one."""
        if self.session:
            self._http.post(f"{ROOT}/sessions/{self.session}/finish").raise_for_status()
        self.session = self._post("create_session", {"tags": []})["session_id"]
        asked = {"session_id": self.session, "base_model": str(MODEL)}
        lora = {"rank": 4, "seed": 1}
        made = self._post("create_model", asked | {"model_seq_id": 0, "lora_config": lora})
        self.run, self.sequence = made["model_id"], 0
        self.await_result(made["request_id"])
        opened = self._post("create_sampling_session", asked | {"sampling_session_seq_id": 0})
        self.sampler = opened["sampling_session_id"]
        self.await_result(self._post("asample", self.make_sample())["request_id"])

    def await_result(self, request_id: str) -> httpx.Response:
        """The result of a request."""
        end_s = time.monotonic() + 120
        while True:  # each question waits a while
            question = {"request_id": request_id}
            answer = self._http.post(f"{ROOT}/retrieve_future", json=question)
            if answer.status_code != PENDING:
                return answer
            assert time.monotonic() < end_s, f"waited two minutes for {request_id}"

    def make_sample(self) -> dict[str, Any]:
        """A short sample, in the form of ``asample``."""
        return {
            "sampling_session_id": self.sampler,
            "seq_id": next(self._numbers),
            "num_samples": 1,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
            "sampling_params": {
                "max_tokens": 4,
                "stop": [],
                "seed": 1,
                "temperature": 1.0,
                "top_k": 5,
                "top_p": 0.9,
            },
            "prompt_logprobs": True,
            "topk_prompt_logprobs": 2,
        }

    def choose_object(self, chooser: random.Random) -> tuple[str, dict[str, Any]]:
        """The path and the content of a request with a JSON object."""
        number = self.sequence + chooser.choice((1, 1, 1, 1, 1, 1, 0, -1, 2))
        operation = {"model_id": self.run, "seq_id": number}
        adam = {"learning_rate": 1e-4, "beta1": 0.9, "grad_clip_norm": 1.0, "weight_decay": 0.01}
        session = {"session_id": self.session}
        begun = session | {"base_model": str(MODEL)}
        path = f"tinker://{self.run}/weights/fuzz"
        place = next(self._numbers)
        requests: list[tuple[str, dict[str, Any]]] = [
            ("create_session", {"tags": ["a"], "user_metadata": {"a": "b"}, "sdk_version": "1"}),
            ("session_heartbeat", session),
            ("create_model", begun | {"model_seq_id": place, "lora_config": {"rank": 4}}),
            ("get_info", {"model_id": self.run}),
            ("optim_step", operation | {"adam_params": adam}),
            ("save_weights", operation | {"path": "fuzz"}),
            ("save_weights_for_sampler", operation | {"path": f"fuzz-{place}"}),
            ("save_weights_external", operation | {"path": f"fuzz-{place}"}),
            ("load_weights", operation | {"path": path, "optimizer": True}),
            ("create_sampling_session", begun | {"sampling_session_seq_id": place}),
            ("asample", self.make_sample()),
            ("asample", self.make_sample()),
            ("asample", self.make_sample() | {"target_prompt_logprobs": {"tokens": [[1], [2]]}}),
            ("retrieve_future", {"request_id": f"create:{self.run}"}),
            ("cancel_future", {"request_id": f"sample:{self.sampler}:{place - 1}"}),
            ("weights_info", {"tinker_path": path}),
            ("telemetry", {"events": []}),
        ]
        name, content = chooser.choice(requests)
        return f"{ROOT}/{name}", content

    def choose_named(self, chooser: random.Random, odd: str) -> tuple[str, str]:
        """The method and the path of a request whose path has an odd name."""
        run = chooser.choice((self.run, odd))
        saved = f"{ROOT}/training_runs/{run}/checkpoints/{chooser.choice(('weights', odd))}/{odd}"
        return chooser.choice(
            (
                ("GET", f"{ROOT}/sessions/{odd}"),
                ("POST", f"{ROOT}/sessions/{odd}/finish"),
                ("GET", f"{ROOT}/samplers/{odd}"),
                ("GET", f"{ROOT}/training_runs/{odd}"),
                ("GET", f"{ROOT}/training_runs/{odd}/checkpoints"),
                ("GET", f"{ROOT}/checkpoints?limit={odd}&offset={odd}"),
                ("GET", f"{saved}/external_weights_urls"),
                ("POST", f"{saved}/publish"),
                ("PUT", f"{saved}/ttl"),
                ("DELETE", saved),
                ("GET", f"{ROOT}/links/{odd}/{odd}"),
            )
        )

    def make_pass(self, chooser: random.Random) -> bytes:
        """A pass over a datum as a binary message; now and then some bytes of it are others."""
        datum = types.Datum(
            model_input=types.ModelInput.from_ints([5, 6, 7]),
            loss_fn_inputs={"target_tokens": types.TensorData.from_numpy(np.array([6, 7, 8]))},
        )
        given = ForwardBackwardInput(data=[datum], loss_fn="cross_entropy")
        request = ForwardBackwardRequest(
            forward_backward_input=given, model_id=self.run, seq_id=self.sequence + 1
        )
        body = bytearray(forward_backward_request_to_proto(request).SerializeToString())
        for _ in range(chooser.choice((0, 0, 1, 1, 2, 5))):
            at = chooser.randrange(len(body))
            if chooser.random() < 0.3:
                body[at:] = chooser.randbytes(chooser.randrange(4))
                body += b"\0"
            else:
                body[at] = chooser.randrange(256)
        return bytes(body)

    def _post(self, path: str, content: dict[str, Any]) -> dict[str, Any]:
        answer = self._http.post(f"{ROOT}/{path}", json=content)
        assert answer.status_code == 200, (path, answer.text)
        return answer.json()
