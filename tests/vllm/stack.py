"""A trainer and a vLLM deployment with a folder of snapshots between them, as workers have them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from hearth.inference.worker import build
from hearth.launch.sidecars import LocalSidecars
from hearth.models.lora import LoraOptions
from hearth.sync.store import FolderBuckets
from hearth.trainer.engine import TrainerEngine
from hearth.trainer.options import TrainerOptions
from hearth.wire.tensors import encode
from hearth.wire.tinker import AdamParams, DatumRecord
from training.quickstart import MODEL

NAME = "accounts/me/deployments/d"
PROMPT = [5, 17, 40, 41, 9]
OPTIONS = {"kv_cache_mb": 64, "start_timeout_s": 240.0}
TOLERANCE = 1e-3
"""Nats between vLLM's kernels and the trainer's in float32; they differ by some 1e-5."""


class Deployment:
    """The app of a deployment on vLLM, asked as clients ask it."""

    def __init__(
        self,
        folder: Path,
        *,
        model: Path = MODEL,
        replicas: int = 1,
        max_seq_len: int = 256,
        **options: Any,
    ) -> None:
        self.folder = folder
        self.sidecars = LocalSidecars(folder / "sidecars")
        self.phases: list[str] = []
        self.app, self._close = build(
            buckets=str(folder / "buckets"),
            name=NAME,
            base_model=str(model),
            source=str(model),
            bucket="b",
            state_dir=str(folder / "state"),
            tokenizer=None,
            engine="vllm",
            replicas=replicas,
            engine_options=OPTIONS | options,
            dtype="float32",
            device="cpu",
            max_seq_len=max_seq_len,
            max_batch_size=32,
            max_adapters=0,
            trust_remote_code=False,
            sidecars=self.sidecars,
            on_phase=self.phases.append,
        )
        self._clients = ThreadPoolExecutor(64)
        self.snapshots = FolderBuckets(folder / "buckets").bucket("b")

    def ask(self, method: str, path: str, body: Any = None, **params: Any) -> Any:
        return asyncio.run(self._asked(method, path, body, params))

    async def _asked(self, method: str, path: str, body: Any, params: Any) -> Any:
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, timeout=120) as client:
            response = await client.request(
                method, f"http://deployment{path}", json=body, params=params
            )
        if response.headers["content-type"].startswith("text/event-stream"):
            return response.text
        content = response.json()
        assert response.status_code == 200, content
        return content

    def complete(self, **fields: Any) -> list[dict[str, Any]]:
        """Choices of a completion request for token ids and arrays."""
        body = {
            "prompt": PROMPT,
            "max_tokens": 12,
            "temperature": 1.0,
            "logprobs": True,
            "seed": 3,
            "logprob_format": "arrays",
            "raw_output": True,
            "ignore_eos": True,
            **fields,
        }
        choices = self.ask("POST", "/v1/completions", body)["choices"]
        return [{**choice, "prompt": body["prompt"]} for choice in choices]

    def hot_load(self, identity: str, **fields: Any) -> dict[str, Any]:
        """Serve a snapshot; the replica's state once that has ended."""
        path = "/hot_load/v1/models/hot_load"
        self.ask("POST", path, {"identity": identity, **fields})
        state = self.ask("GET", path, wait_for=identity, timeout_s="120")
        return state["replicas"][0]

    def running(self, count: int, **fields: Any) -> list[Future[list[dict[str, Any]]]]:
        """Requests of one completion each, under way, with seeds from 0 on."""
        return [self._clients.submit(self.complete, seed=seed, **fields) for seed in range(count)]

    def servers(self) -> list[int]:
        """Processes of vLLM's API servers."""
        listed = processes()
        own = f"{self.folder}/sidecars"
        supervisors = {
            pid for pid, (_, line) in listed.items() if "supervisor.py" in line and own in line
        }
        return [pid for pid, (parent, _) in listed.items() if parent in supervisors]

    def addresses(self) -> list[str]:
        """Where vLLM's API servers listen, from their command lines."""
        found: list[str] = []
        for pid in self.servers():
            line = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            host, port = (line[line.index(flag) + 1] for flag in ("--host", "--port"))
            found.append(f"{host}:{port}")
        return found

    def close(self) -> None:
        self._close()
        self.sidecars.close()
        self._clients.shutdown()


class Trainer:
    """A trainer, of the shipped model by default, which publishes into a deployment's bucket."""

    def __init__(
        self, deployment: Deployment, work_dir: Path, lora_rank: int = 0, *, model: Path = MODEL
    ) -> None:
        self.engine = TrainerEngine(
            str(model),
            snapshots=deployment.snapshots,
            checkpoint_dir=work_dir / "checkpoints",
            options=TrainerOptions(dtype="float32", max_seq_len=256),
        )
        lora = LoraOptions(rank=lora_rank, seed=1) if lora_rank else None
        self.model_id = self.engine.create_model(lora)

    def step(self, learning_rate: float = 1e-3) -> None:
        rng = np.random.default_rng(0)
        rows = rng.integers(3, 60, (4, 33))
        self.engine.forward_backward(self.model_id, [datum(row.tolist()) for row in rows])
        adam = AdamParams(learning_rate=learning_rate)
        self.engine.optim_step(self.model_id, adam, "num_loss_tokens")

    def save(self, identity: str, kind: Any = "base") -> str:
        self.engine.save_for_sampler(self.model_id, identity, kind)
        return identity

    def logprobs(self, tokens: list[int]) -> np.ndarray:
        """Of the tokens after the first."""
        return self.engine.forward(self.model_id, [datum(tokens)]).logprobs[0]

    def gap(self, choice: dict[str, Any], since: int = 0) -> float:
        """Largest difference to the logprobs of a choice's tokens ``since`` a place, in nats."""
        prompt, sampled = choice["prompt"], choice["raw_output"]["completion_token_ids"]
        own = self.logprobs([*prompt, *sampled])[len(prompt) - 1 :]
        return float(np.abs(own - np.array(logprobs_of(choice)))[since:].max())

    def close(self) -> None:
        self.engine.close()


def logprobs_of(choice: dict[str, Any]) -> list[float]:
    return choice["raw_output"]["logprobs"]


def datum(tokens: list[int]) -> DatumRecord:
    targets = np.array(tokens[1:])
    inputs = {
        "target_tokens": encode(targets, "int64"),
        "weights": encode(np.ones(len(targets), dtype=np.float32), "float32"),
    }
    return DatumRecord.model_validate(
        {
            "model_input": {"chunks": [{"tokens": tokens[:-1]}]},
            "loss_fn_inputs": {name: input.as_dict() for name, input in inputs.items()},
        }
    )


def processes() -> dict[int, tuple[int, str]]:
    """The parent and the command line of each process."""
    found: dict[int, tuple[int, str]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            found[int(folder.name)] = int(parent), line
    return found


def events(text: str) -> list[dict[str, Any]]:
    """The bodies of a stream's events."""
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]
