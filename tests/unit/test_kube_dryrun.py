"""Which refusals of a dry run mean that the template is at fault."""

from __future__ import annotations

from typing import Any

import pytest
from kube_documents import service

from xpyd_operator.kube.client.api import ApiError
from xpyd_operator.kube.objects.dryrun import AGAIN_S, DryRun, fault
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
    """``answers``: a refusal, the spec that it takes instead, or None where it takes all of it."""

    def __init__(self, *answers: ApiError | dict[str, Any] | None) -> None:
        self.answers = list(answers)
        self.asked: list[dict[str, Any]] = []

    async def create(self, kind: str, namespace: str, body: dict[str, Any], *, dry_run: bool = False) -> dict[str, Any]:
        assert (kind, namespace, dry_run) == (body["kind"], "team-a", True)
        self.asked.append(body)
        answer = self.answers.pop(0)
        if isinstance(answer, ApiError):
            raise answer
        return body if answer is None else body | {"spec": answer}


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


async def test_what_the_api_server_left_out_is_a_fault_with_its_path() -> None:
    """Such as an image volume, or a claim of a device, where that feature is off: the engine would end without it."""
    document = service(decode={"replicas": 1, "resources": {}, "template": {"spec": {
        "volumes": [{"name": "weights", "image": {"reference": "quay.io/weights:1"}}], "priorityClassName": "high"}}})
    server = Server(None)
    await made(server).ask(document, Role.DECODE, REVISION, 0.0)
    (pod,) = server.asked
    without = pod["spec"] | {"volumes": [each for each in pod["spec"]["volumes"] if each["name"] != "weights"]}
    words = await made(Server(without)).ask(document, Role.DECODE, REVISION, 0.0)
    assert words.startswith("it leaves out spec.volumes[weights] (")
    changed = pod["spec"] | {"priorityClassName": "low", "priority": 7, "tolerations": [{"key": "added"}]}
    assert await made(Server(changed)).ask(document, Role.DECODE, REVISION, 0.0) == "", "what has another value is there"


async def test_all_policies_are_tried_and_each_verdict_is_remembered() -> None:
    refused = ApiError(400, "BadRequest", 'unknown field "spec.ingress[0].from[0].namespaceSelector.matchLabel"')
    server = Server(None, refused, None)
    dry_run = made(server)
    for now in (0.0, AGAIN_S - 1):
        assert await dry_run.ask_policies(service(), now) == refused.message
    assert await dry_run.ask_policies(service(), AGAIN_S + 1) == ""
    assert [each["metadata"]["name"] for each in server.asked] == ["qwen-check", "qwen-clients-check", "qwen-clients-check"]
    assert await made(Server()).ask_policies(service(networkPolicy={"enabled": False}), 0.0) == ""
