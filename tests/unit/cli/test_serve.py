import pytest

from hearth.cli.serve import serve


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--host", "0.0.0.0"), "host must be a loopback address while there is no API key"),
        (("--port", "70000"), "port must be in 0..65535, got 70000"),
        (("--settings", "none.toml"), "settings must be a TOML file, got 'none.toml'"),
    ],
)
def test_a_setting_that_breaks_its_rule_is_one_line(capsys, monkeypatch, tmp_path, flags, message):
    monkeypatch.delenv("HEARTH_API_KEYS", raising=False)
    data_dir = tmp_path / "data"

    assert serve(["--data-dir", str(data_dir), *flags]) == 2

    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1
    assert error[0].startswith(f"error: {message}")
    assert not data_dir.exists()
