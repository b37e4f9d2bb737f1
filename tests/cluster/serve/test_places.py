from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray._private.utils import validate_socket_filepath

from cluster.errors import UserError
from cluster.serve import haproxy, places
from cluster.serve.places import forget_others, ray_directory, usable_home

USER = os.getuid()


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="p", dir="/tmp") as directory:  # a short name
        yield Path(directory)


def refused(environment: dict[str, str], user: int = USER) -> str:
    with pytest.raises(UserError) as raised:
        ray_directory(environment, user)
    message = str(raised.value)
    assert "RAY_TMPDIR names another place" in message
    return message


@pytest.mark.parametrize("name", ["RAY_TMPDIR", "TMPDIR"])
def test_the_directory_is_made_for_this_user_alone(place: Path, name: str) -> None:
    for _ in "made", "there":
        found = ray_directory({name: str(place)}, USER)
        assert found == f"{place}/kvatlas-{USER}"
        assert stat.S_IMODE(os.stat(found).st_mode) == 0o700
        assert os.listdir(found) == []


def test_a_place_that_does_not_fit_is_passed_over_where_it_was_not_given_for_ray(
    place: Path,
) -> None:
    usual = ray_directory({}, USER)
    for unfit in (place / ("x" * 60), Path("/proc/no")):
        assert ray_directory({"TMPDIR": str(unfit)}, USER) == usual
        refused({"RAY_TMPDIR": str(unfit)})


@pytest.mark.parametrize(
    ("more", "name"),
    [({}, places.LONGEST_NAME), ({haproxy.MODE: "1"}, haproxy.LONGEST_NAME)],
)
def test_the_longest_place_just_holds_the_sockets(
    place: Path, more: dict[str, str], name: str
) -> None:
    longest = str(place / "x").ljust(107 - len(name) - len(f"/kvatlas-{USER}"), "x")
    found = ray_directory({"RAY_TMPDIR": longest, **more}, USER)
    validate_socket_filepath(found + name)
    with pytest.raises(OSError, match="AF_UNIX"):
        validate_socket_filepath(f"{found}x{name}")
    message = refused({"RAY_TMPDIR": f"{longest}x", **more})
    assert f"{longest}x/kvatlas-{USER}: too long for the names of Unix sockets" in message
    assert f"of at most {len(longest)} bytes" in message


def test_a_directory_that_others_could_change_is_not_used(place: Path) -> None:
    stranger = USER + 1
    (place / f"kvatlas-{stranger}").mkdir()
    assert "belongs to another user" in refused({"RAY_TMPDIR": str(place)}, stranger)
    (place / f"kvatlas-{USER}").symlink_to("/")
    assert "belongs to another user" in refused({"RAY_TMPDIR": str(place)})


def test_a_place_that_cannot_be_written_is_named_with_the_reason(place: Path) -> None:
    (place / "file").touch()
    assert "file/kvatlas-" in (message := refused({"RAY_TMPDIR": f"{place}/file"}))
    assert "Not a directory" in message


def test_a_user_without_a_usable_home_gets_one(place: Path) -> None:
    assert usable_home({"HOME": str(place)}, str(place)) is None
    for home in ("/proc/none", str(place / "missing")):
        assert usable_home({"HOME": home}, str(place)) == f"{place}/home"
    assert (place / "home").is_dir()


def test_another_ray_is_not_seen() -> None:
    environment = {"RAY_ADDRESS": "10.0.0.1:6379", "RAY_REDIS_ADDRESS": "x", "RAY_DEDUP_LOGS": "0"}
    assert forget_others(environment) == "10.0.0.1:6379"
    assert environment == {"RAY_DEDUP_LOGS": "0"}
    assert forget_others(environment) == ""
