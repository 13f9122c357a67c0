"""The table of checks names functions that exist, in an order in which each finds what it reads."""

import re
from inspect import signature

import pytest

from ulysses.check import preflight
from ulysses.check.preflight import TABLE, make_checks
from ulysses.config.section import AbsentError, ConfigError
from ulysses.registry import load

# what is known before the first check, and what a run adds before those of later moments
FIRST = {
    *("config", "world_size", "stage", "strict", "run"),
    *("model", "absent", "routers", "adapters", "models", "rewards", "others"),
}
LATER = {
    "data": {"train", "held_out"},
    "resuming": {"digests"},
    "processes": {"inputs", "digests", "verify"},
    "folder": {"resources"},
    "plan": {"device", "mesh", "case"},
}


def test_every_check_exists_and_reads_what_is_known_by_then():
    known = set(FIRST)
    for line in TABLE.strip().splitlines():
        when, place, reads, *finds = re.split(" {2,}", line)
        known |= LATER.get(when, set())
        names = [name.rstrip("?") for name in reads.split()]
        assert {*names} <= known, line
        room = "ulysses" if "." in place else "ulysses.check"
        signature(load(f"{room}.{place}")).bind(*names)
        known |= {name for found in finds for name in found.split()}


def rows(monkeypatch, *lines):
    monkeypatch.setattr(preflight, "TABLE", "\n".join(lines))


def test_a_check_is_left_out_where_what_it_reads_is_unknown(monkeypatch):
    rows(
        monkeypatch,
        "files  config.section:visible  text  shown",
        "files  config.section:flat  absent  never",
        "files  config.section:absolute  path?  whole",
        "later  config.section:flat  text  never",
    )
    known = make_checks("files", text="a\0", path="/a")
    assert known == {"text": "a\0", "path": "/a", "shown": "a\\x00", "whole": "/a"}


def test_all_that_is_wrong_is_told_at_once_and_absence_is_a_finding(monkeypatch, tmp_path):
    rows(
        monkeypatch,
        "files  config.section:existing  path  there",
        "files  config.section:absolute  text  whole",
        "files  config.section:flat  there  never",
    )
    given = {"path": tmp_path / "none", "text": "a://b"}
    with pytest.raises(
        ConfigError, match="2 settings are wrong:\n.* there is no .*\n.* is an address"
    ):
        make_checks("files", **given)
    with pytest.raises(ConfigError, match="^a://b is an address"):
        make_checks("files", [], **given)
    findings = []
    assert "there" not in make_checks("files", findings, path=given["path"])
    assert findings == [str(AbsentError(f"there is no {given['path']}; correct the path"))]
