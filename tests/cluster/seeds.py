"""What requests tell the workers and the ingress of `tests.cluster.faults` by their seeds."""

from __future__ import annotations

BREAKS, KILLS, DIES_LENDING = 101, 102, 103
"""A request whose steps raise, one that kills its worker, and one after which its worker dies when
another asks it for blocks."""

RAISES, NULL_BLOCK, UNCLEAR, PULLS = 201, 202, 203, 204
"""Requests for which the policy raises, chooses a gang that is not there, chooses one whose name
cannot be compared, and lets a gang that lacks the prompt pull it."""

SENT = 300
"""With this seed to the first gang by name, with the next one to the second, and so on."""
