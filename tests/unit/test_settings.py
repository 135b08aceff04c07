import hashlib
import re
from pathlib import Path

import pytest

from hearth.errors import ConfigError
from hearth.settings import Settings, is_loopback, read_api_key, read_settings, read_url


@pytest.fixture(autouse=True)
def no_keys(monkeypatch):
    monkeypatch.delenv("HEARTH_API_KEYS", raising=False)


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "hearth.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def test_without_a_file_and_flags_the_defaults_hold():
    settings = read_settings(None, {})

    assert settings == Settings()
    assert (settings.host, settings.port, settings.placement) == ("127.0.0.1", 8000, "process")
    assert settings.api_keys() == {}
    assert settings.may_name_folders is True


def test_flags_stand_over_the_file_and_the_file_over_the_defaults(file):
    path = file('port = 1\nplacement = "inline"\ntrainer_threads = 2\norphan_timeout_s = 5\n')

    settings = read_settings(path, {"port": 9})

    assert (settings.port, settings.placement) == (9, "inline")
    assert (settings.trainer_threads, settings.orphan_timeout_s) == (2, 5)
    assert settings.max_body_mb == 1024


def test_paths_of_a_file_are_paths_and_begin_at_home(file):
    path = file('data_dir = "~/hearth"\ncatalog = "c.toml"\n')

    settings = read_settings(path, {})

    assert settings.data_dir == Path.home() / "hearth"
    assert settings.catalog == Path("c.toml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot = 1", "settings must be among ['allow_folders', 'api_keys_file'"),
        ("[server]\nport = 1", "got ['server']"),
        ("port =", "settings must be a TOML file, got"),
        (b"host = '\xff'", "settings must be a TOML file, got"),
        ("port = 65536", "port must be in 0..65535, got 65536"),
        ("port = -1", "port must be in 0..65535, got -1"),
        ('port = "80"', "port must be a whole number, got '80'"),
        ("port = true", "port must be a whole number, got True"),
        ("port = 80.5", "port must be a whole number, got 80.5"),
        ("host = 3", "host must be a text, got 3"),
        ("data_dir = 3", "data_dir must be a path, got 3"),
        ("catalog = []", "catalog must be a path, got []"),
        ('placement = "cloud"', "placement must be 'process', 'inline' or 'ray', got 'cloud'"),
        ("placement = 3", "placement must be a text, got 3"),
        ("trainer_threads = 0", "trainer_threads must be >= 1 or unset, got 0"),
        ("deployment_threads = -2", "deployment_threads must be >= 1 or unset, got -2"),
        ("max_body_mb = 0", "max_body_mb must be >= 1, got 0"),
        ("keep_snapshots = -1", "keep_snapshots must be >= 0, got -1"),
        ("orphan_timeout_s = 0", "orphan_timeout_s must be > 0, got 0"),
        ("orphan_timeout_s = nan", "orphan_timeout_s must be > 0, got nan"),
        ('orphan_timeout_s = "long"', "orphan_timeout_s must be a number, got 'long'"),
        ("allow_folders = 1", "allow_folders must be true or false, got 1"),
        ("database_url = 3", "database_url must be a text, got 3"),
    ],
)
def test_a_name_or_value_that_breaks_its_rule_is_one_line(file, text, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as failed:
        read_settings(file(text), {})
    assert "\n" not in str(failed.value)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"settings must be a TOML file, got .*none\.toml"):
        read_settings(tmp_path / "none.toml", {})


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::", "10.0.0.1", "my.machine", "localhost.x"])
def test_an_address_that_others_reach_needs_a_key(host, monkeypatch):
    with pytest.raises(ConfigError, match="host must be a loopback address while there is no API"):
        Settings(host=host)

    monkeypatch.setenv("HEARTH_API_KEYS", "a-key")
    settings = Settings(host=host)
    assert set(settings.api_keys()) == {"a-key"}
    assert settings.may_name_folders is False
    assert Settings(host=host, allow_folders=True).may_name_folders is True


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_an_address_of_this_machine_alone_needs_none(host):
    assert is_loopback(host)
    assert Settings(host=host).api_keys() == {}


def test_keys_come_from_the_environment_and_a_file_together(tmp_path, monkeypatch):
    path = tmp_path / "keys"
    path.write_text("one\n\n  two  \nfive  Eve\n")
    monkeypatch.setenv("HEARTH_API_KEYS", " three, four ,,")

    keys = Settings(api_keys_file=path).api_keys()

    assert set(keys) == {"one", "two", "three", "four", "five"}
    assert keys["five"] == "Eve"
    assert keys["one"] == hashlib.sha256(b"one").hexdigest()[:12]


@pytest.mark.parametrize("content", [None, b"", b"\n \n", b"\xff\xfe", b"a b\nc d e"])
def test_a_key_file_without_keys_is_refused_also_on_loopback(tmp_path, content):
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(ConfigError, match="api_keys_file must be a readable file with keys, got"):
        Settings(api_keys_file=path)


def test_no_key_is_shown_with_the_settings(tmp_path, monkeypatch):
    path = tmp_path / "keys"
    path.write_text("hunter2")
    monkeypatch.setenv("HEARTH_API_KEYS", "hunter3")

    assert "hunter" not in repr(Settings(api_keys_file=path))


@pytest.mark.parametrize("number", [0, 65])
def test_gateways_are_one_to_64(number):
    with pytest.raises(ConfigError, match=f"gateways must be in 1..64, got {number}"):
        Settings(gateways=number)


def test_several_gateways_refuse_what_they_would_ignore(monkeypatch):
    monkeypatch.setenv("HEARTH_API_KEYS", "a-key")

    with pytest.raises(ConfigError, match="gateways must be 1 with placement 'inline'"):
        Settings(gateways=2, placement="inline")
    with pytest.raises(ConfigError, match="requests_per_key must be unset with several gateways"):
        Settings(gateways=2, requests_per_key=2)
    assert Settings(gateways=2, workers_per_key=2).gateways == 2


@pytest.mark.parametrize("name", ["workers_per_key", "requests_per_key"])
def test_limits_of_keys_need_keys(name, monkeypatch):
    with pytest.raises(ConfigError, match=f"{name} must be unset without API keys"):
        Settings(**{name: 2})

    monkeypatch.setenv("HEARTH_API_KEYS", "a-key")
    assert getattr(Settings(**{name: 2}), name) == 2
    with pytest.raises(ConfigError, match=f"{name} must be >= 1 or unset, got 0"):
        Settings(**{name: 0})


@pytest.mark.parametrize(
    ("variables", "url", "key"),
    [
        ({}, "", ""),
        ({"HEARTH_URL": "http://a", "HEARTH_API_KEY": "k"}, "http://a", "k"),
        ({"FIREWORKS_BASE_URL": "http://b", "FIREWORKS_API_KEY": "l"}, "http://b", "l"),
        ({"FIREWORKS_BASE_URL": "http://b", "HEARTH_URL": "http://a"}, "http://a", ""),
    ],
)
def test_a_platform_is_named_by_our_variables_and_by_the_older_ones(
    monkeypatch, variables, url, key
):
    for name in ("HEARTH_URL", "HEARTH_API_KEY", "FIREWORKS_BASE_URL", "FIREWORKS_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    assert (read_url(), read_api_key()) == (url, key)
