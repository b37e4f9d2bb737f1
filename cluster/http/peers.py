"""The state of all ingresses, so that any of them answers `/metrics` and `/debug` for all."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from prometheus_client.core import Metric


@dataclass(frozen=True, slots=True)
class IngressState:
    """Metrics of one ingress, and its clients' labels of the requests in flight."""

    ingress: str
    families: list[Metric] = field(default_factory=list)
    labels: dict[str, str] = field(default_factory=dict)


class Peers(Protocol):
    """All ingresses, this one among them."""

    async def all(self) -> list[IngressState]:
        """The state of each. Raises if one does not answer in time."""
        ...


def merged(own: IngressState, others: list[IngressState]) -> list[Metric]:
    """The metrics of all, each family once."""
    families: dict[str, Metric] = {}
    for state in (own, *(other for other in others if other.ingress != own.ingress)):
        for family in state.families:
            if family.name in families:
                families[family.name].samples.extend(family.samples)
            else:
                families[family.name] = family
    return list(families.values())
