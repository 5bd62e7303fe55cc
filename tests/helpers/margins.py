"""Conformance points that came close to their tolerance in a run: they may exceed it with other seeds."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

SHARE = "share of the tolerance"  # name of a test's property
CLOSE = 0.8
MOST = 20


def closest(reports: Iterable[pytest.TestReport]) -> list[str]:
    """Return a line for each test that used over ``CLOSE`` of its tolerance, the closest first."""
    shares = {r.nodeid: v for r in reports for n, v in r.user_properties if n == SHARE and float(v) > CLOSE}
    lines = [f"{share:.0%} {name}" for name, share in sorted(shares.items(), key=lambda item: -item[1])]
    return lines[:MOST]
