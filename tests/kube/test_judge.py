"""What the operator has against a document, on a real API server: warnings stop nothing, nor do rules that came later."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

import pytest
from kube_client import KubeError, path_of
from kube_team import Team
from kube_watched import DEADLINE_S

pytestmark = pytest.mark.timeout(1200)
CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/disaggservices.xpyd.dev"
JSON_PATCH = "application/json-patch+json"
RULES = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties/decode/x-kubernetes-validations"
BOTH = {"replicas": 1, "scaling": {"min": 1, "max": 2}}
DRAFTS = ["--speculative-config", '{"method": "eagle", "model": "a/b", "num_speculative_tokens": 3}']


async def columns(team: Team) -> dict[str, str]:
    """The one row of ``kubectl get dsvc``."""
    head, row = (await team.kubectl("get", "dsvc")).splitlines()
    starts = [match.start() for match in re.finditer(r"\S+", head)]  # cells may be empty
    cells = [slice(begin, end) for begin, end in zip(starts, [*starts[1:], None], strict=True)]
    return {head[cell].strip(): row[cell].strip() for cell in cells}


async def test_a_warning_is_an_event_and_the_document_is_followed(team: Team) -> None:
    await team.apply(team.document(decode={"replicas": 1, "args": DRAFTS}))
    await team.wait_settled("1P1D")
    await team.wait(lambda: team.events("EngineWouldRefuse"), "the warning is told")
    (event,) = team.events("EngineWouldRefuse")
    assert event["message"].startswith("spec.decode.args[0]: prefill does not draft, so the draft's KV is not handed over")
    assert (event["type"], event["message"][-11:]) == ("Warning", "(vLLM 0.32)")
    assert team.condition("Valid")["status"] == "True"
    row = await columns(team)
    assert (row["READY"], row["REASON"], row["SERVING"]) == ("True", "AllReady", "1P1D")


async def test_a_column_says_why_it_is_not_ready(team: Team) -> None:
    spread = {"replicas": 1, "parallelism": {"data": 2, "pods": 2}}
    await team.apply(team.document(decode=spread, kv={"offload": {"memory": "1Gi"}}))
    await team.wait_condition("Valid", "False", words=("Unsupported", "spec.kv.offload"))
    row = await columns(team)
    assert (row["READY"], row["REASON"]) == ("False", "Unsupported")


@pytest.mark.parametrize(("spec", "words"), [
    ({"engine": {"args": ["--seed", "1", "--tensor-par=2"]}},
     "--tensor-parallel-size is set by xpyd; write spec.prefill.parallelism or spec.decode.parallelism"),
    ({"model": {"source": "ftp://bucket/qwen"}}, "ftp://bucket/qwen is no source of a model; write a hub id"),
], ids=str)
async def test_the_api_server_itself_says_what_is_wrong_and_what_to_write(
    quiet_team: Team, spec: dict[str, Any], words: str
) -> None:
    document, path = quiet_team.document(**spec), path_of("DisaggService", quiet_team.namespace)
    with pytest.raises(KubeError) as refused:
        await quiet_team.kube.request("POST", path, document, dryRun="All")
    assert refused.value.status == 422
    assert words in str(refused.value)


async def test_a_rule_that_came_later_stops_no_service(quiet_team: Team) -> None:
    """Made under a CRD without the rule, and accepted by the operator of that time; then both are upgraded."""
    team = quiet_team
    document = team.document(decode=BOTH)
    crd = await team.kube.request("GET", CRD)
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    rules = schema["properties"]["spec"]["properties"]["decode"]["x-kubernetes-validations"]
    await team.kube.request("PATCH", CRD, [{"op": "remove", "path": RULES}], content=JSON_PATCH)
    try:
        end = time.monotonic() + DEADLINE_S
        while True:  # until the API server has taken the change in
            try:
                await team.apply(document)
                break
            except KubeError as error:
                assert error.status == 422  # noqa: PT017 (it is tried again)
                assert time.monotonic() < end
                await asyncio.sleep(0.1)
        accepted = {"type": "Valid", "status": "True", "reason": "Valid", "message": "the document is followed",
                    "lastTransitionTime": "2026-01-01T00:00:00Z", "observedGeneration": 1}
        status = {"observedGeneration": 1, "conditions": [accepted]}
        await team.kube.merge("DisaggService", team.namespace, "qwen", {"status": status}, "status")
    finally:
        again = [{"op": "add", "path": RULES, "value": rules}]
        await team.kube.request("PATCH", CRD, again, content=JSON_PATCH)
    end = time.monotonic() + DEADLINE_S
    while True:  # likewise, for others
        try:
            other = document | {"metadata": {"name": "other"}}
            path = path_of("DisaggService", team.namespace)
            await team.kube.request("POST", path, other, dryRun="All")
        except KubeError as error:
            assert "replicas and scaling exclude each other" in str(error)  # noqa: PT017 (it is refused now)
            break
        assert time.monotonic() < end, "the rule is not in force"
        await asyncio.sleep(0.1)
    await team.operator.start()
    await team.wait_settled("1P1D")
    said = team.condition("Valid")
    assert (said["status"], said["reason"]) == ("True", "AcceptedBefore")
    assert "spec.decode: replicas and scaling exclude each other" in said["message"]
    assert await team.operator.stop() == 0
    before = {pod["metadata"]["uid"] for pod in team.pods()}
    await team.operator.start()  # its own status says now that it was accepted
    await team.kube.delete("Pod", team.namespace, "qwen-e1", grace_s=0)
    await team.wait(lambda: {pod["metadata"]["uid"] for pod in team.pods()} - before, "the pod is made again")
    await team.wait_settled("1P1D")
    assert team.condition("Valid")["reason"] == "AcceptedBefore"
