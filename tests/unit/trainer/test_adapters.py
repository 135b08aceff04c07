import pytest

from hearth.errors import NotFoundError, RequestError
from hearth.trainer.options import AdapterStore


def test_a_promoted_adapter_is_found_by_its_name(tmp_path):
    (tmp_path / "tuned").mkdir()

    store = AdapterStore(tmp_path, allow_folders=False)

    assert store.find_folder("accounts/me/models/tuned") == tmp_path / "tuned"


def test_an_adapter_that_was_never_promoted_is_not_found(tmp_path):
    with pytest.raises(NotFoundError, match="must name a promoted model"):
        AdapterStore(tmp_path).find_folder("accounts/me/models/tuned")


@pytest.mark.parametrize("name", ["../secret", "a/b", "", "..", "%2e%2e"])
def test_a_promoted_name_cannot_leave_the_folder_of_models(tmp_path, name):
    (tmp_path.parent / "secret").mkdir(exist_ok=True)

    with pytest.raises(RequestError, match="adapter_path must be"):
        AdapterStore(tmp_path).find_folder(f"accounts/me/models/{name}")


def test_a_folder_may_be_named_only_where_that_is_allowed(tmp_path):
    assert AdapterStore(None).find_folder(str(tmp_path)) == tmp_path
    with pytest.raises(RequestError, match=r"must be accounts/me/models/NAME on this platform"):
        AdapterStore(tmp_path, allow_folders=False).find_folder(str(tmp_path))
