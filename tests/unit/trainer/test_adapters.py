import pytest

from hearth.errors import NotFoundError, RequestError
from hearth.trainer.adapters import AdapterShelf


def test_a_promoted_adapter_is_found_by_its_name(tmp_path):
    (tmp_path / "tuned").mkdir()

    shelf = AdapterShelf(tmp_path, allow_folders=False)

    assert shelf.folder("accounts/me/models/tuned") == tmp_path / "tuned"


def test_an_adapter_that_was_never_promoted_is_not_found(tmp_path):
    with pytest.raises(NotFoundError, match="must name a promoted model"):
        AdapterShelf(tmp_path).folder("accounts/me/models/tuned")


@pytest.mark.parametrize("name", ["../secret", "a/b", "", "..", "%2e%2e"])
def test_a_promoted_name_cannot_leave_the_folder_of_models(tmp_path, name):
    (tmp_path.parent / "secret").mkdir(exist_ok=True)

    with pytest.raises(RequestError, match="adapter_path must be"):
        AdapterShelf(tmp_path).folder(f"accounts/me/models/{name}")


def test_a_folder_may_be_named_only_where_that_is_allowed(tmp_path):
    assert AdapterShelf(None).folder(str(tmp_path)) == tmp_path
    with pytest.raises(RequestError, match=r"must be accounts/me/models/NAME on this platform"):
        AdapterShelf(tmp_path, allow_folders=False).folder(str(tmp_path))
