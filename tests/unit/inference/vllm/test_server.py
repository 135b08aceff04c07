from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
import torch

from hearth.errors import ConfigError, EngineError
from hearth.inference.vllm.options import VllmOptions, read_options
from hearth.inference.vllm.plugin.access import TOKEN_VARIABLE
from hearth.inference.vllm.plugin.entry import register
from hearth.inference.vllm.server import ServerPlan, explain_start, is_port_taken, write_plugin
from hearth.models.lora import LoraOptions
from hearth.sync.snapshot import Snapshot


def plan(**changes: object) -> ServerPlan:
    fields: dict[str, object] = {
        "python": "/py",
        "source": "/model",
        "tokenizer": "/words",
        "plugin_dir": Path("/plugin"),
        "dtype": "float32",
        "max_seq_len": 100,
        "max_batch_size": 8,
        "is_cpu": True,
        **changes,
    }
    return ServerPlan(**fields)  # type: ignore[arg-type]


def flag(argv: list[str], name: str) -> str:
    return argv[argv.index(name) + 1]


def test_the_command_line_says_what_the_deployment_is() -> None:
    command = plan().command("replica-0")
    argv = list(command.argv)

    assert argv[:3] == ["/py", "-m", "vllm.entrypoints.launchers.api_server.entry"]
    assert flag(argv, "--model") == "/model"
    assert (flag(argv, "--host"), flag(argv, "--port")) == ("{host}", "{port}")
    assert flag(argv, "--tokenizer") == "/words"
    assert flag(argv, "--max-model-len") == "101"
    assert flag(argv, "--max-num-seqs") == "8"
    assert flag(argv, "--logprobs-mode") == "processed_logprobs"
    assert flag(argv, "--kv-cache-memory-bytes") == str(2**30)
    assert "--enforce-eager" in argv
    assert "--enable-lora" not in argv
    assert command.env["PYTHONPATH"] == "/plugin"
    assert flag(argv, "--middleware") == "hearth.inference.vllm.plugin.access.ServerAccess"
    assert command.env[TOKEN_VARIABLE] not in " ".join(argv)
    assert command.gpus == 0


def test_on_a_gpu_memory_and_graphs_are_vllms_own_business() -> None:
    options = VllmOptions(tensor_parallel_size=2, gpu_memory_utilization=0.4)
    command = plan(is_cpu=False, options=options).command("replica-0")

    assert "--enforce-eager" not in command.argv
    assert "--kv-cache-memory-bytes" not in command.argv
    assert flag(list(command.argv), "--gpu-memory-utilization") == "0.4"
    assert command.gpus == 2


@pytest.mark.parametrize(("rank", "room"), [(1, "1"), (4, "8"), (16, "16"), (17, "32")])
def test_adapters_get_room_for_a_rank_that_vllm_knows(rank: int, room: str) -> None:
    argv = list(plan(options=VllmOptions(lora_rank=rank)).command("replica-0").argv)
    assert flag(argv, "--max-lora-rank") == room


def test_an_adapter_of_experts_is_refused() -> None:
    name = "base_model.model.model.layers.0.mlp.experts.down_proj.lora_A"
    adapter = Snapshot(
        "a", "lora", "m", {name: torch.zeros(2, 8, 4)}, LoraOptions(rank=8).as_metadata()
    )

    with pytest.raises(EngineError, match="must leave a mixture's experts alone with engine 'vllm"):
        VllmOptions(lora_rank=8).check(adapter)


def test_an_adapter_beyond_the_room_is_refused() -> None:
    metadata = LoraOptions(rank=8).as_metadata()
    adapter = Snapshot("a", "lora", "m", {}, metadata)

    VllmOptions(lora_rank=8).check(adapter)
    for options in (VllmOptions(), VllmOptions(lora_rank=4)):
        with pytest.raises(EngineError, match="lora_rank must be >= 8 for adapter 'a'"):
            options.check(adapter)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"speed": 1}, "engine_options must be among"),
        ({"start_timeout_s": 0}, r"start_timeout_s must be > 0, got 0"),
        ({"lora_rank": True}, "lora_rank must be a whole number, got True"),
        ({"lora_rank": 1000}, r"lora_rank must be in 1\.\.512, got 1000"),
        ({"kv_cache_mb": "1"}, "kv_cache_mb must be a whole number, got '1'"),
        ({"gpu_memory_utilization": 1.5}, r"must be in \(0, 1\], got 1.5"),
        ({"drain": "hurry"}, "drain must be 'wait' or 'abort', got 'hurry'"),
    ],
)
def test_options_that_break_their_rule_are_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_options(given)


def test_options_are_read() -> None:
    options = read_options({"start_timeout_s": 30, "drain": "abort", "lora_rank": None})
    assert options == VllmOptions(start_timeout_s=30, drain="abort")


def test_the_plugin_folder_shows_the_entry_point_and_no_other_package(tmp_path: Path) -> None:
    folder = write_plugin(write_plugin(tmp_path / "plugin"))

    found = importlib.metadata.distributions(path=[str(folder)])
    points = [point for item in found for point in item.entry_points]
    assert [(point.group, point.name) for point in points] == [("vllm.general_plugins", "hearth")]
    assert points[0].load() is register
    assert {path.name for path in folder.iterdir()} == {"hearth", "hearth_vllm_plugin-1.dist-info"}


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("/py: No module named vllm", "vLLM must be installed for '/py'"),
        ("ModuleNotFoundError: No module named 'vllm'", "HEARTH_VLLM_PYTHON"),
        ("finding 'vllm.entry' (ModuleNotFoundError: No module named 'vllm')", "pip install"),
        ("ModuleNotFoundError: No module named 'vllm.entrypoints.x'", "of a version that"),
        ("ModuleNotFoundError: No module named 'zmq'", "have its own dependencies"),
        ("OSError: [Errno 98] Address already in use", "its port must be free"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried", "lower engine_options.kv_cache_mb"),
        ("ValueError: No available memory for the cache blocks.", "must fit the memory"),
        ("Model architectures ['X'] are not supported for now.", "use engine 'embedded'"),
        ("vllm: error: unrecognized arguments: --x", "of a version that knows these flags"),
    ],
)
def test_a_failed_start_says_what_to_do(line: str, advice: str) -> None:
    lines = ["starting", line, "Engine core initialization failed. See root cause above."]
    text = explain_start("exited with code 1", lines, "/py")

    assert advice in text
    assert text.startswith("vLLM's server must start, got one that exited with code 1: ")
    assert line in text


def test_what_nobody_knows_is_told_with_its_last_lines() -> None:
    text = explain_start("exited with code 1", ["a surprise"], "/py")
    assert text.endswith("see its last lines; its log ends with: a surprise")


def test_a_server_that_was_killed_may_have_had_too_little_memory() -> None:
    assert "where memory is short" in explain_start("ended by SIGKILL", [], "/py")


def test_only_a_taken_port_is_worth_another_try() -> None:
    assert is_port_taken(["x", "OSError: [Errno 98] Address already in use"])
    assert not is_port_taken(["out of memory"])


def test_servers_of_a_deployment_share_a_token_and_deployments_do_not() -> None:
    first, other = plan(), plan()

    tokens = [made.command(name).env[TOKEN_VARIABLE] for made in (first, other) for name in "ab"]

    assert tokens[0] == tokens[1] != tokens[2] == tokens[3]
