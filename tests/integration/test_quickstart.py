import orjson
import pytest
import transformers
from tests.integration.runs import read_steps

from training.quickstart.verb import quickstart


@pytest.mark.slow
def test_the_quickstart_learns_and_leaves_what_it_promises(tmp_path, capsys):
    assert quickstart(["--log-path", str(tmp_path), "--seed", "0"]) == 0

    summary = orjson.loads((tmp_path / "summary.json").read_bytes())
    assert summary["accuracy_before"] < 0.5
    assert summary["accuracy_after"] >= 0.85
    assert summary["steps"] == len(read_steps(tmp_path))
    assert set(summary) >= {"wall_s", "first_step_s", "peak_rss_mb"}
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "question: " in (tmp_path / "rollouts_after.txt").read_text()
    printed = capsys.readouterr().out
    assert "accuracy" in printed
    assert printed.splitlines()[-1].endswith(f"hearth view {tmp_path}")
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "models" / "quickstart")
    assert exported.config.model_type == "qwen3"
