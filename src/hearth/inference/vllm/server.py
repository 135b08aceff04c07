"""One vLLM server as a sidecar process: its command line, and explanations of failed starts.

The server is vLLM's own OpenAI server in its own environment. A folder on its ``PYTHONPATH``
contains a link to the ``hearth`` package and registers a plugin.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import hearth
from hearth.inference.vllm.options import VllmOptions
from hearth.inference.vllm.plugin.access import TOKEN_VARIABLE, ServerAccess
from hearth.inference.vllm.plugin.entry import NAME
from hearth.inference.vllm.plugin.worker import SnapshotWorker
from hearth.settings import VLLM_PYTHON_VARIABLE
from hearth.sidecars import Command

BASE_NAME = "base"
"""Model name of requests without an adapter."""
MOST_LISTED_LOGPROBS = 21
"""The sampled token's, and those of the 20 most probable ones."""
_CPU_CACHE_MB = 1024
_MIB = 2**20

_WORKER = f"{SnapshotWorker.__module__}.{SnapshotWorker.__qualname__}"
_ENTRY_POINTS = "[vllm.general_plugins]\nhearth = hearth.inference.vllm.plugin.entry:register\n"
_METADATA = "Metadata-Version: 2.1\nName: hearth-vllm-plugin\nVersion: 1\n"


@dataclass(frozen=True, kw_only=True)
class ServerPlan:
    """What all servers of a deployment have in common."""

    python: str
    """The interpreter that has vLLM."""
    source: str
    """Folder or hub id of the model."""
    tokenizer: str
    plugin_dir: Path
    dtype: str
    max_seq_len: int
    max_batch_size: int
    is_cpu: bool
    trust_remote_code: bool = False
    options: VllmOptions = field(default_factory=VllmOptions)
    token: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    """The token that every request to a server must carry (``plugin.access``)."""

    def command(self, name: str) -> Command:
        """The command that starts one server under ``name``."""
        options = self.options
        values = {
            "--model": self.source,
            "--host": "{host}",
            "--port": "{port}",
            "--served-model-name": BASE_NAME,
            "--tokenizer": self.tokenizer,
            "--dtype": self.dtype,
            # Scoring a sequence of full length samples one token more.
            "--max-model-len": str(self.max_seq_len + 1),
            "--max-num-seqs": str(self.max_batch_size),
            "--generation-config": "vllm",
            "--logprobs-mode": "processed_logprobs",
            "--max-logprobs": str(MOST_LISTED_LOGPROBS),
            "--weight-transfer-config": f'{{"backend": "{NAME}"}}',
            "--worker-extension-cls": _WORKER,
            "--middleware": f"{ServerAccess.__module__}.{ServerAccess.__qualname__}",
            "--tensor-parallel-size": str(options.tensor_parallel_size),
        }
        # Not `vllm serve`, which fails where the package has another name, as its CPU build has.
        argv = [self.python, "-m", "vllm.entrypoints.launchers.api_server.entry"]
        argv += [word for pair in values.items() for word in pair]
        argv += ["--enable-scale-out", "--enable-prompt-tokens-details"]
        argv.append("--disable-uvicorn-access-log")
        if self.trust_remote_code:
            argv.append("--trust-remote-code")
        if self.is_cpu if options.enforce_eager is None else options.enforce_eager:
            argv.append("--enforce-eager")
        if (rank := options.room_for_rank) is not None:
            argv += ["--enable-lora", "--max-loras", "1", "--max-lora-rank", str(rank)]
        cache_mb = options.kv_cache_mb or (_CPU_CACHE_MB if self.is_cpu else None)
        if cache_mb is not None:
            argv += ["--kv-cache-memory-bytes", str(cache_mb * _MIB)]
        if options.gpu_memory_utilization is not None:
            argv += ["--gpu-memory-utilization", str(options.gpu_memory_utilization)]
        gpus = 0 if self.is_cpu else options.tensor_parallel_size
        return Command(name=name, argv=argv, env=self._environment(), gpus=gpus)

    def _environment(self) -> dict[str, str]:
        environment = {
            "PYTHONPATH": str(self.plugin_dir),
            TOKEN_VARIABLE: self.token,
            # Opens the endpoints of weight updates.
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
        }
        if self.is_cpu:
            # Other workers compute on the same cores.
            environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        return environment


def write_plugin(folder: Path) -> Path:
    """Write the folder for vLLM's ``PYTHONPATH``: our package, and the plugin's entry point.

    It has a link to the ``hearth`` package and two text files, and nothing else of our environment.
    """
    facts = folder / "hearth_vllm_plugin-1.dist-info"
    facts.mkdir(parents=True, exist_ok=True)
    (facts / "METADATA").write_text(_METADATA, encoding="utf-8")
    (facts / "entry_points.txt").write_text(_ENTRY_POINTS, encoding="utf-8")
    link = folder / "hearth"
    if not link.is_symlink():
        link.symlink_to(Path(hearth.__path__[0]).resolve(), target_is_directory=True)
    return folder


_OWN_MODULE = re.compile(r"No module named '?vllm(?![\w.])")
_CAUSES: Sequence[tuple[re.Pattern[str], str]] = (
    (
        re.compile(r"address already in use|Errno 98", re.IGNORECASE),
        "its port must be free: something else took it meanwhile; start the deployment again",
    ),
    (
        re.compile(
            r"out of memory|No available memory for the cache|Available memory on node|"
            r"Free memory on device|KV cache is needed|larger than the (available|maximum)|"
            r"MemoryError|can't allocate memory|std::bad_alloc",
            re.IGNORECASE,
        ),
        "the model and its KV cache must fit the memory: lower engine_options.kv_cache_mb or "
        "gpu_memory_utilization, use dtype 'bfloat16', a shorter max_context_length, a smaller "
        "model, or a higher tensor_parallel_size",
    ),
    (
        re.compile(
            r"Model architectures? .* (is|are) not supported|not recognize this architecture|"
            r"head_size|Head size|has no vLLM implementation|failed to be inspected"
        ),
        "base_model must be a model that this vLLM serves: use engine 'embedded', or a vLLM that "
        "knows it",
    ),
    (
        re.compile(r"unrecognized arguments|No module named"),
        "vLLM must be of a version that knows these flags and have its own dependencies: Hearth is "
        "tested with 0.32",
    ),
)


def is_port_taken(lines: Sequence[str]) -> bool:
    """Whether a server died because its port was taken."""
    return any(_CAUSES[0][0].search(line) for line in lines)


def explain_start(how: str, lines: Sequence[str], python: str) -> str:
    """Why a server did not start and what to do, from how it ended and its last log lines."""
    if any(_OWN_MODULE.search(line) for line in lines):
        advice = (
            f"vLLM must be installed for {python!r}: install it into an environment of its own "
            f"(pip install 'vllm>=0.32'), and name that one's python in {VLLM_PYTHON_VARIABLE}"
        )
    else:
        # The first error is the cause of those after it.
        causes = (text for line in lines for pattern, text in _CAUSES if pattern.search(line))
        advice = next(causes, "see its last lines")
        if advice == "see its last lines" and "SIGKILL" in how:
            advice = "it was killed, as the system does where memory is short: " + _CAUSES[1][1]
    text = f"vLLM's server must start, got one that {how}: {advice}"
    return text + ("; its log ends with: " + " | ".join(lines) if lines else "")
