import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hearth.errors import ConfigError
from training.rollouts.staleness import GateLimits, StalenessGate, Taken


def make_gate(
    rows: int = 8, completions: int = 8, late: int = 0, **changes: int | None
) -> StalenessGate:
    """A gate of ``rows`` per step, ``completions`` each, at most ``late`` versions late."""
    return StalenessGate(GateLimits(rows, completions, late, **changes))


def submit(gate: StalenessGate, *rows: int, finished: Sequence[int] = ()) -> None:
    """Submit ``rows``; then some finish, in the order of ``finished``."""
    for row in rows:
        gate.submit(row)
    finish(gate, *finished)


def finish(gate: StalenessGate, *rows: int) -> None:
    for row in rows:
        gate.finish(row)


def take(gate: StalenessGate, most: int | None = None) -> list[int]:
    return [taken.row for taken in gate.take(most)]


def train(gate: StalenessGate) -> None:
    """The current batch is trained and published."""
    gate.end_batch()
    gate.publish()


@pytest.mark.parametrize(("late", "rows"), [(0, 8), (1, 16), (2, 24), (4, 40)])
def test_before_the_first_sync_o_plus_1_batches_of_rows_may_be_submitted(late, rows):
    gate = make_gate(late=late)
    assert (gate.rows_to_submit(), gate.staleness_room()) == (rows, rows * 8)

    submit(gate, *range(rows))

    assert (gate.rows_to_submit(), gate.staleness_room()) == (0, 0)
    with pytest.raises(RuntimeError, match=rf"row must wait for room, got {rows} with"):
        gate.submit(rows)


def test_the_room_after_each_event_is_the_formulas():
    gate = make_gate(rows=2, completions=4, late=1)
    taken: list[int] = []
    events = [
        (lambda: submit(gate, 0, 1, 2), (4, 12, 0)),  # 16 - 12: three rows run
        (lambda: gate.finish(0), (4, 8, 4)),  # a finished row keeps its room
        (lambda: gate.reject(1), (8, 4, 4)),  # a rejected one gives it back
        (lambda: gate.finish(2), (8, 0, 8)),
        (lambda: gate.reject(2), (12, 0, 4)),  # also after it had finished
        (lambda: (submit(gate, 3), gate.finish(3)), (8, 0, 8)),
        (lambda: taken.extend(take(gate)), (8, 0, 8)),  # being taken changes nothing
        (gate.end_batch, (8, 0, 8)),  # nor does being trained
        (gate.publish, (16, 0, 8)),  # a version more is B samples more
    ]
    for event, expected in events:
        event()
        assert (gate.staleness_room(), gate.running_samples, gate.accepted_samples) == expected
    assert taken == [0, 3]


def test_at_o_0_the_next_rows_wait_for_the_publication():
    gate = make_gate(rows=2, completions=1)
    submit(gate, 0, 1, finished=[1, 0])
    assert take(gate) == [0, 1]

    gate.end_batch()
    assert (gate.step, gate.version, gate.rows_to_submit()) == (1, 0, 0)

    gate.publish()
    assert (gate.step, gate.version, gate.rows_to_submit()) == (1, 1, 2)


@pytest.mark.parametrize(
    ("limit", "rows", "room"),
    [(None, 40, None), (8, 1, 8), (15, 1, 15), (16, 2, 16), (999, 40, 999)],
)
def test_rows_start_whole_within_the_limit_of_samples_in_flight(limit, rows, room):
    gate = make_gate(late=4, max_concurrency_rollout_sample=limit)
    assert (gate.rows_to_submit(), gate.concurrency_room()) == (rows, room)


def test_a_finished_row_frees_its_samples_in_flight_but_not_its_room():
    gate = make_gate(rows=2, completions=4, late=1, max_concurrency_rollout_sample=9)
    submit(gate, 0, 1)
    assert (gate.rows_to_submit(), gate.concurrency_room(), gate.staleness_room()) == (0, 1, 8)

    gate.finish(0)
    assert (gate.rows_to_submit(), gate.concurrency_room(), gate.staleness_room()) == (1, 5, 8)


def test_a_partial_batch_leaves_no_room_that_later_batches_have_no_places_for():
    gate = make_gate(rows=4, completions=1)
    submit(gate, 0, finished=[0])
    assert take(gate) == [0]

    train(gate)

    assert gate.rows_to_submit() == 4


def test_a_batch_takes_finished_rows_in_the_order_of_submission():
    gate = make_gate(rows=3, completions=2, late=1)
    submit(gate, 10, 7, 12, 5, finished=[12, 10, 7])
    assert gate.ready() == 3

    assert take(gate) == [10, 7, 12]
    assert (gate.ready(), gate.places_left(), gate.unresolved) == (0, 0, 1)


@pytest.mark.parametrize(("slack", "batch"), [(0, []), (1, [2]), (2, [2, 3])])
def test_slack_is_how_many_unfinished_rows_a_batch_may_leave_behind(slack, batch):
    gate = make_gate(rows=2, completions=1, late=3, fifo_slack=slack)
    submit(gate, *range(6), finished=[2, 3, 4])

    assert take(gate) == batch
    assert gate.ready() == 0


def test_with_slack_0_each_batch_has_exactly_the_next_rows():
    gate = make_gate(rows=2, completions=1, late=1, fifo_slack=0)
    submit(gate, 0, 1, 2, 3, finished=[3, 2, 1])

    # Row 1 is among the next two, so it may go in first; rows 2 and 3 wait for the next batch.
    assert take(gate) == [1]
    gate.finish(0)
    assert take(gate) == [0]
    train(gate)
    assert take(gate) == [2, 3]


def test_a_rejected_row_makes_the_window_reach_one_row_further():
    gate = make_gate(rows=2, completions=1, late=3, fifo_slack=0)
    submit(gate, 0, 1, 2, finished=[2])
    assert gate.ready() == 0

    gate.reject(0)
    assert take(gate) == [2]


def test_taking_in_parts_gives_what_taking_at_once_gives():
    parts, whole = (make_gate(rows=4, completions=1, late=2, fifo_slack=1) for _ in range(2))
    for gate in (parts, whole):
        submit(gate, *range(8), finished=[7, 6, 4, 2, 1, 0])

    assert [take(parts, 1), take(parts, 2), take(parts, 0), take(parts)] == [[0], [1, 2], [], [4]]
    assert take(whole) == [0, 1, 2, 4]


def test_a_row_that_is_not_due_leaves_the_places_of_due_rows_free():
    gate = make_gate(rows=3, completions=1, late=1, fifo_slack=1)
    submit(gate, 0, 1, 2, 3, 4, finished=[0, 1, 2])
    assert take(gate) == [0, 1, 2]
    train(gate)
    submit(gate, 5, 6, 7, finished=[5, 6, 7])

    # Rows 3 and 4 are of version 0 and due now: one of three places is not theirs.
    assert gate.late_rows() == [3, 4]
    assert take(gate) == [5]
    assert gate.ready() == 0
    gate.drop(3)
    assert take(gate) == [6]
    gate.finish(4)
    assert take(gate) == [4]


def test_a_taken_row_tells_where_its_versions_went():
    gate = make_gate(rows=1, completions=1, late=3)
    submit(gate, 0, 1, 2, finished=[0])
    assert gate.take() == [Taken(0, submit_version=0, finish_version=0, offset=0)]
    train(gate)
    finish(gate, 2, 1)
    assert take(gate) == [1]
    gate.end_batch()

    (taken,) = gate.take()

    assert taken == Taken(2, submit_version=0, finish_version=1, offset=2)
    assert (taken.in_flight, taken.in_queue) == (1, 1)


def test_at_o_1_a_slow_row_is_overtaken_once_and_then_waited_for():
    gate = make_gate(rows=2, completions=1, late=1)
    submit(gate, 0, 1, 2, 3, finished=[1, 2, 3])
    assert take(gate) == [1, 2]
    assert gate.late_rows() == []
    train(gate)

    # The others go on as far as O allows: rows 4 and 5 may run while row 0 is waited for.
    assert gate.late_rows() == [0]
    assert gate.rows_to_submit() == 2
    submit(gate, 4, 5, finished=[4, 5])
    assert take(gate) == [3]
    assert gate.rows_to_submit() == gate.ready() == 0
    with pytest.raises(RuntimeError, match="with 3 unresolved, 1 of them late"):
        gate.end_batch()

    gate.finish(0)
    assert [(taken.row, taken.offset) for taken in gate.take()] == [(0, 1)]
    train(gate)
    assert take(gate) == [4, 5]


def test_a_late_row_that_is_given_up_is_counted_and_replaced():
    gate = make_gate(rows=2, completions=1, late=1)
    submit(gate, 0, 1, 2, 3, finished=[1, 2, 3])
    assert take(gate) == [1, 2]
    train(gate)
    submit(gate, 4, 5)
    assert (take(gate), gate.rows_to_submit()) == ([3], 0)

    gate.drop(0)

    assert (gate.stale_drops, gate.late_rows(), gate.rows_to_submit()) == (1, [], 1)
    gate.finish(4)
    assert take(gate) == [4]
    train(gate)
    assert gate.unresolved == 1


def test_only_a_late_row_can_be_dropped():
    gate = make_gate(rows=2, completions=1, late=1)
    submit(gate, 0, 1, 2, finished=[0])

    for row in (0, 1, 99):
        with pytest.raises(RuntimeError, match=rf"row must be late, got {row}: .* is \[\]"):
            gate.drop(row)
    assert (gate.stale_drops, gate.unresolved) == (0, 3)


def test_at_o_0_every_running_row_is_late():
    gate = make_gate(rows=3, completions=1)
    submit(gate, 0, 1, 2, finished=[1])
    assert gate.late_rows() == [0, 2]


def test_a_row_submitted_during_a_publication_is_bound_by_the_old_version():
    gate = make_gate(rows=1, completions=1, late=1)
    submit(gate, 0, finished=[0])
    assert take(gate) == [0]
    gate.end_batch()

    submit(gate, 1)

    # It has version 0 and is therefore due in batch 1.
    assert (gate.version, gate.step, gate.late_rows()) == (0, 1, [1])


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ((0, 8), "prompt_groups_per_step must be >= 1, got 0"),
        ((8, 0), "completions_per_prompt must be >= 1, got 0"),
        ((8, 8, -1), "max_head_offpolicy_versions must be >= 0, got -1"),
        ((8, 8, 0, 7), r"max_concurrency_rollout_sample must be None or >= .* \(8\), got 7"),
        ((8, 8, 0, None, -1), "fifo_slack must be None or between 0 and .* got -1"),
        ((8, 8, 0, None, 9), r"between 0 and prompt_groups_per_step \(8\), got 9"),
    ],
)
def test_a_limit_that_breaks_its_rule_is_refused_by_its_name(limits, message):
    with pytest.raises(ConfigError, match=message):
        GateLimits(*limits)


@pytest.mark.parametrize(("rows", "slack"), [(1, 1), (3, 1), (4, 1), (8, 2), (64, 16)])
def test_the_slack_is_a_quarter_of_a_batch_and_at_least_one_row(rows, slack):
    assert GateLimits(rows, 8).slack == slack
    assert GateLimits(rows, 8, fifo_slack=0).slack == 0


def test_a_row_is_submitted_once():
    gate = make_gate(late=1)
    submit(gate, 3, 4)
    gate.reject(4)

    for row in (3, 4):
        with pytest.raises(RuntimeError, match=f"row must be new to the gate, got {row} again"):
            gate.submit(row)


def test_a_row_ends_once():
    gate = make_gate(rows=2, completions=1)
    submit(gate, 0, 1, finished=[0])
    assert take(gate) == [0]

    for row in (0, 9):
        with pytest.raises(RuntimeError, match=f"row must be running, got {row}"):
            gate.finish(row)
        with pytest.raises(RuntimeError, match=f"waiting for its batch, got {row}"):
            gate.reject(row)
    gate.finish(1)
    with pytest.raises(RuntimeError, match="row must be running, got 1"):
        gate.finish(1)
    assert (gate.running_samples, gate.accepted_samples) == (0, 2)


def test_a_batch_ends_when_it_is_full_or_has_the_last_rows():
    gate = make_gate(rows=2, completions=1)
    with pytest.raises(RuntimeError, match="got 0 rows of 2"):
        gate.end_batch()
    submit(gate, 0, 1, finished=[0])
    assert take(gate) == [0]
    with pytest.raises(RuntimeError, match="got 1 rows of 2 with 1 unresolved, 1 of them late"):
        gate.end_batch()

    gate.reject(1)
    gate.end_batch()
    assert gate.step == 1


def test_a_batch_is_published_after_its_end_and_before_the_next_ones():
    gate = make_gate(rows=1, completions=1, late=2)
    with pytest.raises(RuntimeError, match="got a publication at version 0 and step 0"):
        gate.publish()
    submit(gate, 0, 1, finished=[0, 1])
    assert take(gate) == [0]
    gate.end_batch()
    assert take(gate) == [1]

    with pytest.raises(RuntimeError, match="got the end of step 1 at version 0"):
        gate.end_batch()

    gate.publish()
    gate.end_batch()
    assert (gate.version, gate.step) == (1, 2)


@pytest.mark.slow
def test_a_hundred_thousand_rows_take_seconds_at_most():
    gate = make_gate(rows=1000, completions=2, late=4)
    rows = count()
    started_s = time.process_time()

    for _ in range(100):
        for _ in range(gate.rows_to_submit()):
            row = next(rows)
            gate.submit(row)
            gate.finish(row)
        while gate.places_left():
            assert len(gate.take(20)) == 20
        train(gate)

    assert next(rows) == 104_000
    assert time.process_time() - started_s < 20


LIMITS = st.builds(
    lambda rows, completions, late, more, slack: GateLimits(
        rows,
        completions,
        late,
        max_concurrency_rollout_sample=None if more is None else completions + more,
        fifo_slack=None if slack is None else min(slack, rows),
    ),
    rows=st.integers(1, 6),
    completions=st.integers(1, 4),
    late=st.integers(0, 4),
    more=st.none() | st.integers(0, 40),
    slack=st.none() | st.integers(0, 6),
)


@dataclass
class Known:
    """What the model knows of a row: one of running, finished, taken, rejected, dropped."""

    row: int
    version: int
    state: str = "running"


@dataclass
class Model:
    """The rules again, counted anew from a list of all rows each time they are asked for."""

    limits: GateLimits
    version: int = 0
    step: int = 0
    in_batch: int = 0
    forfeited: int = 0
    """Places that partial batches left empty."""
    rows: list[Known] = field(default_factory=list[Known])

    def of(self, *states: str) -> list[Known]:
        return [row for row in self.rows if row.state in states]

    @property
    def places(self) -> int:
        return self.limits.prompt_groups_per_step - self.in_batch

    def room(self) -> int:
        per_row = self.limits.completions_per_prompt
        batch = self.limits.prompt_groups_per_step * per_row
        reserved = len(self.of("running", "finished", "taken")) + self.forfeited
        budget = self.limits.max_head_offpolicy_versions + self.version + 1
        return budget * batch - reserved * per_row

    def due(self) -> list[Known]:
        newest = self.step - self.limits.max_head_offpolicy_versions
        return [row for row in self.of("running", "finished") if row.version <= newest]

    def next_taken(self) -> Known | None:
        """The one row that a batch takes next, by the rules as they stand."""
        window = self.of("running", "finished")[: self.places + self.limits.slack]
        spare = self.places > len(self.due())
        for row in window:
            if self.places and row.state == "finished" and (row in self.due() or spare):
                return row
        return None

    def take(self, most: int) -> list[int]:
        taken: list[int] = []
        while len(taken) < most and (row := self.next_taken()):
            row.state = "taken"
            self.in_batch += 1
            taken.append(row.row)
        return taken

    def left_behind(self) -> int:
        """Unresolved rows that a younger row has overtaken."""
        last = max((row.row for row in self.of("taken")), default=-1)
        return sum(row.row < last for row in self.of("running", "finished"))


class GateMachine(RuleBasedStateMachine):
    """Any order of events that the gate allows; rows are numbered in the order of submission."""

    @initialize(limits=LIMITS)
    def start(self, limits: GateLimits) -> None:
        self.gate = StalenessGate(limits)
        self.model = Model(limits)

    def pick(self, data: st.DataObject, *states: str) -> Known:
        return data.draw(st.sampled_from(self.model.of(*states)))

    @precondition(lambda self: self.gate.rows_to_submit() > 0)
    @rule(most=st.sampled_from([1, 3, 99]))
    def submit(self, most: int) -> None:
        for _ in range(min(most, self.gate.rows_to_submit())):
            row = Known(len(self.model.rows), self.model.version)
            self.gate.submit(row.row)
            self.model.rows.append(row)

    @precondition(lambda self: self.model.of("running"))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        row = self.pick(data, "running")
        self.gate.finish(row.row)
        row.state = "finished"

    @precondition(lambda self: len(self.model.of("running")) > 1)
    @rule()
    def finish_all_but_the_oldest(self) -> None:
        for row in self.model.of("running")[1:]:
            self.gate.finish(row.row)
            row.state = "finished"

    @precondition(lambda self: self.model.of("running", "finished"))
    @rule(data=st.data())
    def reject(self, data: st.DataObject) -> None:
        row = self.pick(data, "running", "finished")
        self.gate.reject(row.row)
        row.state = "rejected"

    @precondition(lambda self: self.gate.late_rows())
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        row = self.model.rows[data.draw(st.sampled_from(self.gate.late_rows()))]
        self.gate.drop(row.row)
        row.state = "dropped"

    @precondition(lambda self: self.gate.ready() > 0)
    @rule(most=st.none() | st.integers(1, 3))
    def take(self, most: int | None) -> None:
        ready, step = self.gate.ready(), self.model.step
        taken = self.gate.take(most)

        limit = ready if most is None else min(most, ready)
        assert len(taken) == limit
        assert [record.row for record in taken] == self.model.take(limit)
        for record in taken:
            assert record.offset == step - self.model.rows[record.row].version
            assert 0 <= record.offset <= self.model.limits.max_head_offpolicy_versions
            assert record.offset == record.in_flight + record.in_queue
            assert record.in_flight >= 0
            assert record.in_queue >= 0

    @precondition(lambda self: self.may_end())
    @rule()
    def end_batch(self) -> None:
        self.gate.end_batch()
        self.model.forfeited += self.model.places
        self.model.step += 1
        self.model.in_batch = 0

    def may_end(self) -> bool:
        model = self.model
        last = not model.of("running", "finished")
        return model.step == model.version and model.in_batch > 0 and (last or not model.places)

    @precondition(lambda self: self.model.version < self.model.step)
    @rule()
    def publish(self) -> None:
        self.gate.publish()
        self.model.version += 1

    @invariant()
    def counts_are_the_models(self) -> None:
        gate, model, per_row = self.gate, self.model, self.model.limits.completions_per_prompt
        assert (gate.version, gate.step) == (model.version, model.step)
        assert gate.running_rows == len(model.of("running"))
        assert gate.running_samples == len(model.of("running")) * per_row
        assert gate.accepted_samples == len(model.of("finished", "taken")) * per_row
        assert gate.unresolved == len(model.of("running", "finished"))
        assert gate.stale_drops == len(model.of("dropped"))
        assert gate.places_left() == model.places
        assert gate.late_rows() == [row.row for row in model.due() if row.state == "running"]

    @invariant()
    def room_is_the_formulas(self) -> None:
        gate, limits = self.gate, self.model.limits
        limit = limits.max_concurrency_rollout_sample
        rooms = [gate.staleness_room()]
        if limit is not None:
            rooms.append(limit - gate.running_samples)
        assert gate.staleness_room() == self.model.room() >= 0
        assert min(rooms) >= 0
        assert gate.rows_to_submit() == min(rooms) // limits.completions_per_prompt

    @invariant()
    def every_due_row_has_a_place(self) -> None:
        assert len(self.model.due()) <= self.model.places

    @invariant()
    def a_full_batch_leaves_at_most_slack_rows_behind(self) -> None:
        assert self.model.left_behind() <= self.model.limits.slack + self.model.places

    @invariant()
    def something_can_always_happen(self) -> None:
        gate = self.gate
        if gate.running_rows or gate.ready() or not gate.places_left():
            return
        # On-policy, new rows wait for the publication that is under way.
        publishing = gate.step > gate.version and not gate.limits.max_head_offpolicy_versions
        assert gate.unresolved == 0
        assert publishing or gate.rows_to_submit() > 0


GateMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=60, deadline=None, derandomize=True
)
TestGateMachine = pytest.mark.slow(GateMachine.TestCase)
