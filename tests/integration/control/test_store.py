import contextlib
import resource
import sqlite3
import threading

import pytest

from hearth.control.store import Store, check_records
from hearth.errors import ConfigError, ConflictError, EngineError, NotFoundError, StorageError
from hearth.wire.fireworks import TrainerJob


def url_of(request, kind):
    """The URL of an empty database."""
    if kind == "postgresql":
        return request.getfixturevalue("postgres_url")
    path = request.getfixturevalue("tmp_path") / "control.db"
    return f"sqlite:///{path}" if kind == "sqlite-file" else "sqlite://"


@pytest.fixture(params=["sqlite-file", "sqlite-memory", "postgresql"])
def store(request):
    store = Store(url_of(request, request.param))
    yield store
    store.close()


def test_a_row_comes_back_as_it_was_written(store):
    body = {"text": "ü 模型", "nested": {"list": [1, 2.5, None, True]}}

    written = store.jobs.insert("one", "NEW", body, "why")

    assert store.jobs.find("one") == written
    assert (written.body, written.message, written.worker) == (body, "why", None)
    assert written.created_s == written.updated_s


def test_an_id_is_taken_among_its_kind_only(store):
    store.jobs.insert("one", "NEW", {})

    with pytest.raises(ConflictError, match="id must be new among jobs, got 'one'"):
        store.jobs.insert("one", "NEW", {})

    store.deployments.insert("one", "NEW", {})
    assert [record.id for record in store.deployments.list_all()] == ["one"]


def test_of_two_that_insert_one_id_at_once_exactly_one_wins(store):
    outcomes = []
    gate = threading.Barrier(2)

    def insert(number):
        gate.wait()
        for round in range(10):
            try:
                store.jobs.insert(f"id-{round}", "NEW", {"by": number})
                outcomes.append((round, number))
            except ConflictError:
                pass

    threads = [threading.Thread(target=insert, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(round for round, _ in outcomes) == list(range(10))
    assert all(store.jobs.get(f"id-{round}").body == {"by": number} for round, number in outcomes)


def test_two_connections_to_one_database_cannot_both_insert_an_id(tmp_path):
    url = f"sqlite:///{tmp_path / 'shared.db'}"
    first, second = Store(url), Store(url)
    first.jobs.insert("one", "NEW", {})

    with pytest.raises(ConflictError):
        second.jobs.insert("one", "NEW", {})

    first.close()
    second.close()


def test_a_row_moves_only_from_the_states_that_are_named(store):
    record = store.jobs.insert("one", "NEW", {})

    assert not store.jobs.update("one", only_from=("RUNNING",), state="DONE")
    assert store.jobs.find("one") == record
    assert store.jobs.update("one", only_from=("NEW", "RUNNING"), state="DONE", worker={"pid": 1})

    moved = store.jobs.get("one")
    assert (moved.state, moved.worker) == ("DONE", {"pid": 1})
    assert moved.created_s == record.created_s
    assert moved.updated_s >= record.updated_s


def test_a_worker_that_is_none_is_none_again(store):
    store.jobs.insert("one", "NEW", {})
    store.jobs.update("one", worker={"pid": 1})

    store.jobs.update("one", worker=None)

    assert store.jobs.get("one").worker is None


def test_rows_are_listed_oldest_first_and_by_state(store):
    for id, state in (("c", "NEW"), ("a", "DONE"), ("b", "NEW")):
        store.jobs.insert(id, state, {})

    assert [record.id for record in store.jobs.list_all()] == ["c", "a", "b"]
    assert [record.id for record in store.jobs.list_all(("NEW",))] == ["c", "b"]
    assert store.jobs.list_all(()) == []


def damage(path, column, value, id="bad"):
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"UPDATE jobs SET {column} = ? WHERE id = ?", (value, id))


@pytest.mark.parametrize(
    ("column", "value"),
    [("body", "{nope"), ("body", "[]"), ("worker", "7"), ("state", b"\x00"), ("created_s", "x")],
    ids=["cut", "list", "number", "blob", "text"],
)
def test_a_damaged_row_is_left_out_and_named_where_it_is_asked_for(tmp_path, caplog, column, value):
    store = Store(f"sqlite:///{tmp_path / 'control.db'}")
    for id in ("a", "bad", "b"):
        store.jobs.insert(id, "NEW", {"n": 1})
    damage(tmp_path / "control.db", column, value)

    assert [record.id for record in store.jobs.list_all()] == ["a", "b"]
    assert "got a damaged one of 'bad'" in caplog.text
    assert [record.id for record in store.jobs.list_all(("NEW",))] == ["a", "b"]
    with pytest.raises(EngineError, match="jobs must hold readable records, got a damaged one of"):
        store.jobs.get("bad")
    with pytest.raises(ConflictError):
        store.jobs.insert("bad", "NEW", {})
    store.close()


def test_a_database_with_damaged_pages_is_refused(tmp_path):
    path = tmp_path / "control.db"
    store = Store(f"sqlite:///{path}")
    for number in range(200):
        store.jobs.insert(f"job-{number}", "NEW", {"text": "x" * 500})
    store.close()
    content = bytearray(path.read_bytes())
    content[20 * 4096 : 24 * 4096] = b"\xff" * 4 * 4096
    path.write_bytes(content)

    with pytest.raises(ConfigError, match=r"database_url must name an? "):
        Store(f"sqlite:///{path}")


def test_what_was_answered_survives_a_power_cut(tmp_path):
    store = Store(f"sqlite:///{tmp_path / 'control.db'}")
    with store.jobs._engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar_one() == 2, "FULL"
    store.close()


def test_a_database_that_cannot_grow_refuses_and_keeps_what_it_had(tmp_path):
    store = Store(f"sqlite:///{tmp_path / 'control.db'}")
    store.jobs.insert("a", "NEW", {"n": 1})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**18, hard))
    try:
        with pytest.raises(StorageError, match=r"control\.db' must be writable, got .*disk"):
            store.jobs.insert("b", "NEW", {"text": "x" * 2**20})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert [record.id for record in store.jobs.list_all()] == ["a"]
    store.jobs.insert("b", "NEW", {"text": "x" * 2**20})
    store.close()


def test_a_database_that_cannot_be_read_any_more_is_one_error_that_names_it(tmp_path):
    path = tmp_path / "control.db"
    store = Store(f"sqlite:///{path}")
    store.jobs.insert("one", "NEW", {})
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.execute("DROP TABLE jobs")

    for read in (lambda: store.jobs.find("one"), store.jobs.list_all, store.jobs.count):
        with pytest.raises(StorageError, match=r"control\.db' must be readable, got no such table"):
            read()
    assert store.deployments.list_all() == []
    store.close()


def test_an_empty_database_beside_what_jobs_have_left_is_refused(tmp_path):
    store = Store(f"sqlite:///{tmp_path / 'control.db'}")
    check_records(store, tmp_path)
    (tmp_path / "workers" / "deployment-d").mkdir(parents=True)  # it may have been deleted
    check_records(store, tmp_path)

    for folder in ("workers/trainer-j", "checkpoints/j", "models/tuned"):
        (tmp_path / folder).mkdir(parents=True)
        with pytest.raises(ConfigError, match=f"got an empty one beside .*'{folder}'"):
            check_records(store, tmp_path)
    store.jobs.insert("other", "NEW", {})
    check_records(store, tmp_path)
    store.close()


def test_an_unknown_id_lists_the_known_ones(store):
    store.jobs.insert("one", "NEW", {})

    with pytest.raises(NotFoundError, match=r"got 'two': known are \['one'\]"):
        store.jobs.get("two")


def test_a_deleted_row_is_forgotten_and_its_id_free(store):
    store.jobs.insert("one", "NEW", {"n": 1})

    store.jobs.delete("one")
    store.jobs.insert("one", "NEW", {"n": 2})

    assert store.jobs.get("one").body == {"n": 2}


def test_a_nul_in_an_id_or_a_message_breaks_no_statement(store):
    assert store.jobs.find("a\0b") is None

    store.jobs.insert("one", "NEW", {"text": "a\0b"})
    store.jobs.update("one", message="a log line with \0 in it")

    assert store.jobs.get("one").message == "a log line with  in it"
    assert store.jobs.get("one").body == {"text": "a\0b"}


def test_whoever_waits_is_woken_by_each_change_of_that_row_only(store):
    store.jobs.insert("one", "NEW", {})
    store.jobs.insert("two", "NEW", {})

    waiting = [store.jobs.changes.next_change("one") for _ in range(2)]
    store.jobs.update("two", state="DONE")
    assert not any(change.done() for change in waiting)
    store.jobs.update("one", only_from=("RUNNING",), state="DONE")
    assert not any(change.done() for change in waiting)
    store.jobs.update("one", state="DONE")
    assert all(change.done() for change in waiting)

    gone = store.jobs.changes.next_change("one")
    store.jobs.delete("one")
    assert gone.done()


def test_who_stopped_waiting_is_not_woken(store):
    store.jobs.insert("one", "NEW", {})
    left = store.jobs.changes.next_change("one")

    assert left.cancel()
    store.jobs.update("one", state="DONE")

    assert left.cancelled()


def test_closing_wakes_all_who_wait(store):
    waiting = store.models.changes.next_change("one")

    store.close()

    assert waiting.done()


@pytest.mark.parametrize("kind", ["sqlite-file", "postgresql"])
def test_what_was_written_is_there_when_the_database_is_opened_again(request, kind):
    url = url_of(request, kind)
    first = Store(url)
    record = first.jobs.insert("one", "NEW", {"n": 1})
    first.close()

    again = Store(url)

    assert again.jobs.list_all() == [record]
    again.close()


@pytest.mark.parametrize(
    "url", ["", "no url", "sqlite:////nowhere/at/all.db", "unknown+driver://x", "mysql://u:p@h/d"]
)
def test_a_database_that_does_not_open_is_one_line(url):
    with pytest.raises(ConfigError, match="database_url must name a database that opens") as failed:
        Store(url)
    assert "\n" not in str(failed.value)


def test_the_password_of_a_database_is_in_no_message(tmp_path):
    with pytest.raises(ConfigError) as failed:
        Store(f"postgresql+psycopg://user:hunter2@/d?host={tmp_path}")

    assert "hunter2" not in str(failed.value)
    assert "user" in str(failed.value)


def test_a_whole_job_life_on_postgresql(make_plane, script, postgres_url, job):
    plane = make_plane(script, postgres_url)
    record = TrainerJob.from_dict(job())

    plane.jobs.create("j", record, None)
    script.last("j").starts()
    assert plane.jobs.get("j").state == "JOB_STATE_RUNNING"
    script.last("j").dies("a log line with \0 in it")
    assert plane.jobs.get("j").status_message == "a log line with  in it"
    plane.jobs.resume("j")
    script.last("j").starts()
    plane.jobs.cancel("j")
    plane.jobs.delete("j")
    with pytest.raises(ConflictError):
        plane.jobs.create("j", record, None)

    again = Store(postgres_url)
    assert [(record.id, record.state) for record in again.jobs.list_all()] == [
        ("j", "JOB_STATE_DELETED")
    ]
    again.close()
