"""How much of something may be in flight, and one client's part of it."""

import pytest

from hearth.errors import BusyError
from hearth.wire.room import Room


def test_one_client_alone_gets_half_and_leaves_the_rest_to_others():
    room = Room(12, "bodies")
    for _ in range(6):
        room.take("a", 1)

    with pytest.raises(BusyError, match="bodies in flight of one client must be at most 6 now"):
        room.take("a", 1)
    room.take("b", 3)
    with pytest.raises(BusyError, match="at most 3 now, got 4"):
        room.take("b", 1)
    room.take("c", 3)
    with pytest.raises(BusyError, match="at most 0 now, got 1"):
        room.take("d", 1)


def test_what_is_refused_takes_no_room():
    room = Room(4, "bodies")

    with pytest.raises(BusyError):
        room.take("a", 5)
    room.take("a", 4)


def test_what_is_given_back_can_be_taken_again():
    room = Room(4, "bodies")
    room.take("a", 3)
    room.give_back("a", 1)

    room.take("b", 2)
    room.give_back("a", 2)
    room.give_back("b", 2)

    room.take("b", 4)
