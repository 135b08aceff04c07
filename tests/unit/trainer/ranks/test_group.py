"""By which interface ranks find each other."""

from __future__ import annotations

import psutil

from hearth.trainer.ranks.group import find_interface


def test_the_interface_is_the_one_with_the_address_that_a_host_sees() -> None:
    name = find_interface("127.0.0.1")

    assert name is not None
    assert "127.0.0.1" in [addr.address for addr in psutil.net_if_addrs()[name]]


def test_a_host_that_cannot_be_reached_has_none() -> None:
    assert find_interface("no-such-host.invalid") is None
