"""A job that has only a share of a split step: the step's own name means the ranges that the job has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.services.logs import _start
from tests.support.host_side import JOB, Agent, HostSide, Refused, ended, look
from tests.support.waiting import wait_until

SHARE = f"{JOB}-share"


def ranges(*indices: int, run: str) -> list[dict[str, Any]]:
    """Steps of a job that has these of three ranges."""
    return [
        {"name": f"part-{index}of3", "run": run, "timeout_s": 500.0, "retry": {"attempts": 1}, "part": {"of": "part", "index": index, "count": 3}}
        for index in indices
    ]


@pytest.mark.parametrize("indices", [(2,), (2, 3)])
def test_the_name_of_the_split_step_means_the_ranges_of_the_job(tmp_path: Path, indices: tuple[int, ...]) -> None:
    with HostSide(tmp_path / "host") as host:
        agent: Agent = host.agent()
        job = host.launch(agent, ranges(*indices, run="sleep 600"), SHARE)
        wait_until(lambda: {item["state"] for item in look(agent, SHARE)["state"]["steps"]} == {"running"}, "they run")
        limits = agent.request("control", job=SHARE, action="extend", args={"step": "part", "timeout_s": 60})["limits_s"]
        assert limits == {f"part-{index}of3": 560.0 for index in indices}
        with pytest.raises(Refused, match="no step 'prat'"):
            agent.request("control", job=SHARE, action="stop", args={"step": "prat"})
        agent.request("control", job=SHARE, action="stop", args={"step": "part"})
        assert ended(job) == "stopped"
        assert {item["state"] for item in look(agent, SHARE)["state"]["steps"]} == {"stopped"}
        assert agent.request("why", job=SHARE, step="part")["why"]["step"] in {f"part-{index}of3" for index in indices}
        position = _start({"id": SHARE, **look(agent, SHARE)["state"]}, "part", None)
        assert position is not None
        assert position.step in limits
        agent.request("control", job=SHARE, action="retry", args={"step": "part", "set": {f"part-{index}of3.run": "true" for index in indices}})
        wait_until(lambda: look(agent, SHARE)["state"]["state"] == "succeeded", "the retry succeeds")
