"""Tests of the workshop's own tools: helpers of tests, the lab, the runner of tiers. They say nothing of the product."""

from fair_session import fair  # noqa: F401 (a fixture)
