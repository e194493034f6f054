"""The dashboard's paths; what the page shows is looked at in a browser (tests/browser)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from router_fleet import KEY, fleet
from scripted_engine import Play

from xpyd_sidecar import admin_token
from xpyd_sidecar.contract import keys

STATIC = Path(admin_token.__file__).parent / "router" / "endpoints" / "static"
ADMIN = {"Authorization": "Bearer " + keys.admin_token(KEY)}


async def test_the_page_is_there_for_everybody_and_may_load_its_own_files_alone() -> None:
    async with fleet() as f:
        answer = await f.ask("/dashboard")
        assert answer.status == 200
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["frame-ancestors"] == "'none'"
        assert answer.headers["x-content-type-options"] == "nosniff"
        for file in re.findall(r'(?:src|href)="(dashboard/[^"]+)"', answer.body.decode()):
            found = await f.ask(f"/{file}")
            assert (found.status, found.body) == (200, (STATIC / Path(file).name).read_bytes())
            assert found.headers["content-security-policy"] == answer.headers["content-security-policy"]


@pytest.mark.parametrize("file", sorted(STATIC.iterdir()), ids=lambda path: path.name)
def test_the_files_name_no_other_host_and_hold_nothing_that_the_policy_forbids(file: Path) -> None:
    text = file.read_text()
    assert set(re.findall(r"\w+://[^\s\"']+", text)) <= {"http://www.w3.org/2000/svg"}
    if file.suffix == ".html":
        assert not re.search(r"<style|\son\w+=|\sstyle=|<script(?! type=\"module\" src)", text)
    for name in re.findall(r'from "\./([^"]+)"', text):
        assert (STATIC / name).is_file()
    assert not re.search(r"insertAdjacentHTML|outerHTML|document\.write|\beval\(|innerHTML\s*\+?=[^=]", text)


async def test_data_needs_a_token(tmp_path: Path) -> None:
    async with fleet() as f:
        for headers in ({}, {"Authorization": "Bearer x"}, {"Authorization": "Basic " + keys.admin_token(KEY)}):
            answer = await f.ask("/dashboard/data", headers=headers)
            assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
            assert answer.json["error"]["message"] == "This router asks for its admin token."
        assert (await f.ask("/dashboard/data", headers=ADMIN)).status == 200
    file = tmp_path / "keys"
    file.write_text("key-one\n")
    async with fleet(api_key_file=str(file)) as f:
        for path in ("/dashboard/data", "/fleet", "/trace"):  # they name the engines' addresses
            assert (await f.ask(path, headers={"Authorization": "Bearer key-one"})).status == 401


async def test_data_is_the_fleet_and_the_seconds_that_are_new() -> None:
    async with fleet(1, 2) as f:
        f.d[0].default = f.d[1].default = Play(die_after=1)
        await f.complete(stream=True)
        f.d[0].default = f.d[1].default = Play()
        await f.complete(stream=True)
        await f.wait_quiet()
        history = f.context.observer.history
        await f.wait(lambda: sum(row[1] or 0 for row in history.rows_since(0)) == 2, "the seconds of both are over")
        data = (await f.ask("/dashboard/data", headers=ADMIN)).json
        rows = [dict(zip(data["columns"], second, strict=True)) for second in data["seconds"]]
        assert sum(row["done"] for row in rows) == data["fleet"]["requests_total"] == 2
        assert {each["instance"] for each in data["fleet"]["instances"]} == {"p0", "d0", "d1"}
        assert sum(pair["count"] for pair in data["fleet"]["pairs"]) >= 1
        newest = rows[-1]["at"]
        again = (await f.ask("/dashboard/data", headers=ADMIN | {"xpyd-since": str(newest)})).json
        assert all(second[0] > newest for second in again["seconds"])
        for bad in ("x", "-1", "1" * 13):
            answer = await f.ask("/dashboard/data", headers=ADMIN | {"xpyd-since": bad})
            assert (answer.status, answer.json["error"]["code"]) == (400, "bad_since")


async def test_only_its_files_are_served() -> None:
    async with fleet() as f:
        for path in ("/dashboard/", "/dashboard/page.html", "/dashboard/../admin.py", "/dashboard/%2e%2e/x",
                     "/dashboard/data/1"):
            assert (await f.ask(path, headers=ADMIN)).status == 404
        assert (await f.ask("/dashboard/data", method="POST", headers=ADMIN)).status == 405


def test_the_admin_token_of_a_key_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys.write(tmp_path / "key", KEY)
    assert admin_token.main([str(tmp_path / "key")]) == 0
    assert capsys.readouterr().out == keys.admin_token(KEY) + "\n"
    (tmp_path / "bad").write_text("no key")
    for argv in ([], ["a", "b"], [str(tmp_path / "none")], [str(tmp_path / "bad")]):
        assert admin_token.main(argv) == 2
        assert capsys.readouterr().err.count("\n") == 1
