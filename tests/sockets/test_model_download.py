"""A model is fetched from a hub (a server of this test), by the program as the Job of ``model.prefetch`` runs it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from xpyd_sidecar.engine.model_download import needed_files

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"[]",
    "model-00001-of-00002.safetensors": b"a" * 70_000,
    "model-00002-of-00002.safetensors": b"b" * 7,
    "pytorch_model.bin": b"the same again",
    "original/consolidated.00.pth": b"and again",
    "model[1].py": b"code",
}
WANTED = set(FILES) - {"pytorch_model.bin", "original/consolidated.00.pth"}


class Hub:
    """Answers as the hub does, as far as its client asks; ``fetched``: files whose bytes went out."""

    def __init__(self) -> None:
        self.fetched: list[str] = []
        self.revisions: set[str] = set()
        self.tokens: set[str] = set()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.tokens.add(request.headers.get("Authorization", ""))
        path = request.path.removeprefix("/")
        if path.startswith("api/models/org/model/"):
            kind, _, revision = path.removeprefix("api/models/org/model/").partition("/")
            self.revisions.add(revision)
            if kind == "tree":
                return web.json_response([{"type": "file", "path": name, "size": len(data), "oid": COMMIT}
                                          for name, data in FILES.items()])
            return web.json_response({"id": "org/model", "modelId": "org/model", "sha": COMMIT,
                                      "siblings": [{"rfilename": name} for name in FILES]})
        prefix = f"org/model/resolve/{COMMIT}/"
        if not path.startswith(prefix):
            return web.json_response({"error": "Repository not found"}, status=404, headers={
                "X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        name = path.removeprefix(prefix)
        data = FILES[name]
        head = {"ETag": f'"{hashlib.sha1(data, usedforsecurity=False).hexdigest()}"', "X-Repo-Commit": COMMIT}
        if request.method != "HEAD":
            self.fetched.append(name)
        return web.Response(body=data, headers=head)


@contextlib.asynccontextmanager
async def hub() -> AsyncIterator[tuple[Hub, str]]:
    app, made = web.Application(), Hub()
    app.router.add_route("*", "/{path:.*}", made.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield made, f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def run(folder: Path, endpoint: str, *words: str) -> tuple[int, str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    env |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(folder), "HF_TOKEN": "hf_secret", "HF_HUB_DISABLE_XET": "1"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "xpyd_sidecar.engine.model_download", *words, env=env, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE)
    out, err = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


async def test_what_an_engine_reads_is_fetched_once_and_nothing_else(tmp_path: Path) -> None:
    async with hub() as (seen, endpoint):
        code, out, err = await run(tmp_path, endpoint, "org/model", "v1")
        assert (code, err if code else "") == (0, "")
        assert sorted(seen.fetched) == sorted(WANTED)
        assert "v1" in seen.revisions
        assert "Bearer hf_secret" in seen.tokens
        assert contents(Path(out.strip().rpartition(" ")[2])) == {name: FILES[name] for name in WANTED}
        seen.fetched.clear()
        assert (await run(tmp_path, endpoint, "org/model", "v1"))[0] == 0
        assert seen.fetched == [], "an instance that comes finds everything"


async def test_a_model_that_the_hub_does_not_have_is_one_line_and_a_failure(tmp_path: Path) -> None:
    async with hub() as (_, endpoint):
        code, out, err = await run(tmp_path, endpoint, "org/other")
        assert (code, out) == (1, "")
        line = err.strip().splitlines()[-1]
        assert line.startswith("cannot fetch org/other: ")
        assert "Repository" in line


async def test_a_hub_that_nobody_reaches_is_a_failure(tmp_path: Path) -> None:
    async with hub() as (_, endpoint):
        pass
    code, _, err = await run(tmp_path, endpoint, "org/model")
    assert code == 1
    assert err.strip().splitlines()[-1].startswith("cannot fetch org/model: ")


@pytest.mark.parametrize(("files", "needed"), [
    (["config.json"], ["config.json"]),
    (["a.safetensors", "a.bin", "a.pt", "c.json"], ["a.safetensors", "c.json"]),
    (["a.bin", "a.pt"], ["a.bin"]),
    (["a.pt", "a.gguf", "a.onnx"], ["a.pt"]),
    (["consolidated.safetensors", "model.safetensors", "params.json"], ["consolidated.safetensors", "params.json"]),
    (["original/a.safetensors", "a.bin"], ["a.bin"]),
])
def test_of_several_forms_the_one_that_vllm_takes_is_needed(files: list[str], needed: list[str]) -> None:
    assert list(needed_files(files)) == needed
