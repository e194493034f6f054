"""What is counted of a fleet between two questions to its controller."""

from __future__ import annotations

from xpyd_operator.plan.planner.figures import Figures, RoleFigures
from xpyd_operator.simulation.outcome import Pair, p95


class FiguresWindow:
    """What is counted between two questions."""

    def __init__(self) -> None:
        self.arrivals = self.handovers = self.ended = self.prompts = self.outputs = self.samples = 0
        self.arrived = self.handover = self.link_bytes = 0.0
        self.cached = self.read = 0
        self.squares = self.running = self.prefilling = self.kv = 0.0
        self.busy = [0.0, 0.0]
        self.ttft: list[float] = []
        self.tpot: list[float] = []

    def on_request_ended(self, prompt: int, output: int, tpot: float) -> None:
        """Count a request that ended. ``prompt``, ``output``: tokens; ``tpot``: seconds a token."""
        self.ended += 1
        self.prompts += prompt
        self.squares += prompt * prompt
        self.outputs += output
        if output > 1:
            self.tpot.append(tpot)

    def figures(self, over_s: float, ready: Pair, queued: int, parked: int) -> Figures:
        """As the operator would put them together."""
        many = max(1, self.samples)
        return Figures(
            over_s=over_s, arrivals=self.arrivals, arrived_tokens=self.arrived,
            handover_s=self.handover / max(1, self.handovers), ended=self.ended, prompt_tokens=self.prompts,
            prompt_squares=float(self.squares), output_tokens=self.outputs, queued=queued, parked=parked,
            link_bytes=self.link_bytes, cached_share=self.cached / self.read if self.read else 0.0,
            ttft_p95=p95(self.ttft),
            tpot_p95=p95(self.tpot), tpot_mean=sum(self.tpot) / len(self.tpot) if self.tpot else 0.0,
            prefill=RoleFigures(ready=ready[0], busy=self.busy[0] / many, running=self.prefilling / many),
            decode=RoleFigures(ready=ready[1], busy=self.busy[1] / many, running=self.running / many,
                               kv_usage=self.kv / self.busy[1] if self.busy[1] else 0.0),
        )
