"""The license that a model's card names."""

import pytest

from training.run.model_license import UNKNOWN, find_license

CARDS = {
    "named": ("---\ntags: [a]\nlicense: apache-2.0\n---\n# x\n", "apache-2.0"),
    "other": ("---\nlicense: llama3.1 \n---\n", "llama3.1"),
    "only in the text": ("---\ntags: [a]\n---\nlicense: mit\n", UNKNOWN),
    "several": ("---\nlicense:\n- mit\n- other\n---\n", UNKNOWN),
    "no front matter": ("# license: mit\nlicense: mit\n", UNKNOWN),
}


@pytest.mark.parametrize(("card", "license"), CARDS.values(), ids=CARDS.keys())
def test_a_folders_card_says_its_license(card, license, tmp_path):
    (tmp_path / "README.md").write_text(card)

    assert find_license(str(tmp_path)) == license


def test_where_nobody_says_it_is_unknown(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    assert find_license(str(tmp_path)) == UNKNOWN
    assert find_license(str(tmp_path / "gone")) == UNKNOWN
    assert find_license("accounts/fireworks/models/qwen3-8b") == UNKNOWN
    assert find_license("nobody/such-model") == UNKNOWN
