"""A recipe whose weights go from its trainer to its deployment through a bucket."""

from __future__ import annotations

import boto3
from tests.integration.rollouts import spread
from tests.objects import serve_objects

from hearth.objects import ObjectFolder

URL = "s3://weights/run"


def test_a_recipe_trains_the_same_through_a_bucket(trial, monkeypatch):
    through_a_folder = trial(reward_fn=spread, max_rows=6)
    with serve_objects() as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        boto3.client("s3", region_name="us-east-1").create_bucket(Bucket="weights")

        run = trial(reward_fn=spread, max_rows=6, placement="process", snapshot_store=URL)

        manifests = [path for path in ObjectFolder(URL).list() if path.endswith("manifest.json")]
    assert run.summary.version == through_a_folder.summary.version == 3
    assert len(manifests) == 4  # and what is saved at the end
    assert run.records() == through_a_folder.records()
