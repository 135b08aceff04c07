"""The image and its compose file: nothing here can build them, so each of their lines is read."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import tomllib
from pathlib import Path

import sqlalchemy as sql
import tyro
import yaml

from hearth.cli.serve import ServeFlags

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
INSTRUCTIONS = [
    "FROM",
    "RUN",
    "WORKDIR",
    "COPY",
    "USER",
    "VOLUME",
    "EXPOSE",
    "HEALTHCHECK",
    "ENTRYPOINT",
    "CMD",
]


def read_instructions() -> list[tuple[str, str]]:
    lines = (ROOT / "Containerfile").read_text().splitlines()
    pairs = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    return [(name, rest) for name, rest in pairs]


def read_last(name: str) -> str:
    return [rest for instruction, rest in read_instructions() if instruction == name][-1]


def parse_flags(arguments: list[str]) -> ServeFlags:
    assert arguments[0] == "serve"
    return tyro.cli(ServeFlags, args=arguments[1:])


def test_every_instruction_is_known_and_the_base_is_of_a_python_that_we_test() -> None:
    names = [name for name, _ in read_instructions()]

    assert set(names) <= set(INSTRUCTIONS)
    assert names[0] == "FROM"
    version = re.fullmatch(r"python:(3\.\d+)-slim", read_last("FROM"))
    assert version is not None
    assert f"Programming Language :: Python :: {version[1]}" in PROJECT["classifiers"]


def test_every_command_exists_and_every_file_that_is_copied_is_there_and_not_ignored() -> None:
    runs = [rest for name, rest in read_instructions() if name == "RUN"]
    commands = {shlex.split(part)[0] for rest in runs for part in rest.split("&&")}
    ignored = (ROOT / ".dockerignore").read_text().splitlines()

    assert {command for command in commands if shutil.which(command) is None} <= {"apt-get", "pip"}
    for name, rest in read_instructions():
        if name == "COPY":
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert f"!{source}" in ignored, source


def test_the_extras_that_are_installed_exist() -> None:
    (extras,) = re.findall(r'"\.\[([\w,]+)\]"', " ".join(rest for _, rest in read_instructions()))

    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])


def test_the_image_serves_as_an_ordinary_user_on_all_addresses() -> None:
    flags = parse_flags(json.loads(read_last("CMD")))

    assert json.loads(read_last("ENTRYPOINT")) == ["hearth"]
    assert "hearth" in PROJECT["scripts"]
    assert (flags.host, flags.data_dir) == ("0.0.0.0", Path(read_last("VOLUME")))
    assert flags.port is None
    assert read_last("EXPOSE") == "8000"
    assert f"useradd --create-home --uid 1000 {read_last('USER')}" in " ".join(
        rest for _, rest in read_instructions()
    )
    check = json.loads(read_last("HEALTHCHECK").partition("CMD ")[2])
    assert check[:2] == ["python", "-c"]
    compile(check[2], "healthcheck", "exec")


def test_the_compose_file_names_only_what_it_declares() -> None:
    services = COMPOSE["services"]

    for service in services.values():
        assert set(service.get("depends_on", {})) <= set(services)
        assert set(service.get("secrets", [])) <= set(COMPOSE["secrets"])
        for volume in service["volumes"]:
            assert volume.split(":")[0] in COMPOSE["volumes"]
    assert services["platform"]["build"]["dockerfile"] == "Containerfile"
    assert services["platform"]["ports"] == ["127.0.0.1:8000:8000"]


def test_the_platform_of_the_compose_file_reaches_the_database_that_it_starts() -> None:
    services = COMPOSE["services"]
    flags = parse_flags(services["platform"]["command"])
    url = sql.make_url(flags.database_url or "")
    database = services["database"]["environment"]

    assert url.host in services
    assert (url.username, url.database) == (database["POSTGRES_USER"], database["POSTGRES_DB"])
    password = services["platform"]["environment"]["PGPASSWORD"]
    assert password == database["POSTGRES_PASSWORD"]
    assert url.get_dialect().driver == "psycopg"
    assert flags.api_keys_file == Path("/run/secrets/api_keys")
    assert str(flags.data_dir) in services["platform"]["volumes"][0]
