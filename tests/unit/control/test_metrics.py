"""What Prometheus reads of a platform, and what says whether requests may come."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from hearth.control.access import Access


def read(text: str) -> dict[str, float]:
    """Each sample's value by its name and labels."""
    return {
        sample.name + "".join(f" {label}" for label in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_resources_are_counted_by_state_and_requests_by_part_and_status(
    ask: Any, running: Any, deployed: Any
) -> None:
    await running()
    await deployed()
    await ask("GET", "/v1/nothing")
    await ask("POST", "/v1/completions", {"model": "d", "prompt": [1]})

    answer = await ask.http.get("/metrics")
    values = read(answer.text)

    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert values["hearth_jobs JOB_STATE_RUNNING"] == 1
    assert values["hearth_deployments READY"] == 1
    assert values["hearth_requests_total control 404"] == 1
    assert values["hearth_requests_total control 200"] == 2
    assert values["hearth_requests_total deployment 200"] == 1
    assert values["hearth_request_duration_seconds_count control"] == 3
    assert values["hearth_requests_in_progress control"] == 1  # the question itself
    assert values["hearth_requests_in_progress deployment"] == 0
    assert values["process_resident_memory_bytes"] > 2**20


async def test_numbers_need_a_key_where_there_are_keys(plane: Any, make_ask: Any) -> None:
    ask = make_ask(plane, Access(api_keys={"secret": "me"}))

    without = await ask.http.get("/metrics")
    with_key = await ask.http.get("/metrics", headers={"authorization": "Bearer secret"})

    assert (without.status_code, with_key.status_code) == (401, 200)


async def test_a_platform_that_ends_is_alive_and_not_ready(ask: Any) -> None:
    before = await ask.http.get("/readyz")
    ask.app.end()
    alive, ready = await ask.http.get("/healthz"), await ask.http.get("/readyz")

    assert (before.status_code, alive.status_code, ready.status_code) == (200, 200, 503)


async def test_without_its_database_a_platform_is_alive_and_not_ready(plane: Any, ask: Any) -> None:
    with plane.store._engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE models")
    alive, ready = await ask.http.get("/healthz"), await ask.http.get("/readyz")

    assert alive.status_code == 200
    assert ready.status_code >= 500
