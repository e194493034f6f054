"""Which refusals of a dry run mean that the template is at fault."""

from __future__ import annotations

from typing import Any

import pytest
from kube_documents import service

from xpyd_operator.kube.api import ApiError
from xpyd_operator.kube.dryrun import AGAIN_S, DryRun, fault
from xpyd_operator.plan.desired import Revision
from xpyd_operator.render.settings import KubeSettings
from xpyd_sidecar.contract.ids import Role

PODSEC = 'pods "x" is forbidden: violates PodSecurity "restricted:latest": host namespaces (hostNetwork=true)'
REVISION = Revision("0123456789ab")


@pytest.mark.parametrize(("error", "at_fault"), [
    (ApiError(422, "Invalid", "Pod is invalid: spec.containers[0].image: Required value"), True),
    (ApiError(400, "BadRequest", "unknown field"), True),
    (ApiError(403, "Forbidden", PODSEC), True),
    (ApiError(403, "Forbidden", 'admission webhook "x" denied the request: no'), True),
    (ApiError(403, "Forbidden", "exceeded quota: small, requested: pods=1"), False),
    (ApiError(403, "Forbidden", 'pods is forbidden: User "x" cannot create resource "pods"'), False),
    (ApiError(403, "NamespaceTerminating", "namespace a is being terminated"), False),
    (ApiError(409, "AlreadyExists", "there is one"), False),
    (ApiError(500, "InternalError", "webhook down"), False),
    (ApiError(0, "Timeout", "no answer"), False),
])
def test_fault(error: ApiError, at_fault: bool) -> None:
    assert (fault(error) is not None) == at_fault
    assert not at_fault or fault(error) == error.message


class Server:
    def __init__(self, *answers: ApiError | None) -> None:
        self.answers = list(answers)
        self.asked: list[dict[str, Any]] = []

    async def create(self, kind: str, namespace: str, body: dict[str, Any], *, dry_run: bool = False) -> dict[str, Any]:
        assert (kind, namespace, dry_run) == ("Pod", "team-a", True)
        self.asked.append(body)
        answer = self.answers.pop(0)
        if answer is not None:
            raise answer
        return body


def made(server: Server) -> DryRun:
    return DryRun(server, KubeSettings(sidecar_image="sidecar:1"))  # type: ignore[arg-type]


async def test_a_revision_is_tried_once() -> None:
    server = Server(None)
    dry_run = made(server)
    for now in (0.0, 1e6):
        assert await dry_run.ask(service(), Role.DECODE, REVISION, now) == ""
    assert len(server.asked) == 1
    assert server.asked[0]["metadata"]["labels"]["xpyd.dev/role"] == "decode"


async def test_a_refused_revision_is_tried_again_later() -> None:
    server = Server(ApiError(403, "Forbidden", PODSEC), None)
    dry_run = made(server)
    assert await dry_run.ask(service(), Role.DECODE, REVISION, 0.0) == PODSEC
    assert await dry_run.ask(service(), Role.DECODE, REVISION, AGAIN_S - 1) == PODSEC
    assert await dry_run.ask(service(), Role.DECODE, REVISION, AGAIN_S + 1) == ""


@pytest.mark.parametrize("error", [
    ApiError(403, "Forbidden", "exceeded quota: small"), ApiError(409, "AlreadyExists", "x")])
async def test_a_quota_or_a_taken_name_says_nothing_about_the_template(error: ApiError) -> None:
    server = Server(error)
    assert await made(server).ask(service(), Role.DECODE, REVISION, 0.0) == ""


async def test_what_cannot_be_told_is_an_error_and_is_asked_again() -> None:
    server = Server(ApiError(500, "InternalError", "webhook down"), None)
    dry_run = made(server)
    with pytest.raises(ApiError, match="webhook down"):
        await dry_run.ask(service(), Role.DECODE, REVISION, 0.0)
    assert await dry_run.ask(service(), Role.DECODE, REVISION, 0.1) == ""


async def test_a_revision_that_runs_is_not_tried() -> None:
    server = Server()
    dry_run = made(server)
    dry_run.accept(Role.DECODE, REVISION)
    assert await dry_run.ask(service(), Role.DECODE, REVISION, 0.0) == ""
