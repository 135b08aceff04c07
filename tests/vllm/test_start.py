"""What a deployment says that does not start."""

from __future__ import annotations

import sys

import pytest
from tests.vllm.stack import Deployment

from hearth.errors import ConfigError
from hearth.settings import VLLM_PYTHON_VARIABLE


def test_an_interpreter_without_vllm_is_told_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv(VLLM_PYTHON_VARIABLE, sys.executable)
    with pytest.raises(ConfigError, match="vLLM must be installed for"):
        Deployment(tmp_path)


def test_a_cache_that_does_not_fit_says_what_to_lower(tmp_path):
    with pytest.raises(ConfigError, match=r"the model and its KV cache must fit the memory"):
        Deployment(tmp_path, max_seq_len=4000, kv_cache_mb=1)


def test_a_budget_that_is_too_short_is_named(tmp_path):
    with pytest.raises(ConfigError, match="had not answered after 1 s"):
        Deployment(tmp_path, start_timeout_s=1.0)
