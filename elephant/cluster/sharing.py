"""Which device each rank of a run computes on, decided alike by all of them once they know each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from elephant.cluster.devices import Device, no_gpus
from elephant.cluster.rendezvous import RankCard
from elephant.cluster.resources import ResourcePlan
from elephant.errors import ClusterError


@dataclass(frozen=True, kw_only=True)
class Placed:
    """Where one rank computes.

    Args:
        device: Its device, or None: the CPU.
        shared_out: Whether the ranks have chosen it among those of the host, and Spark knows nothing of it.
        note: What the user should know of it.
    """

    device: Device | None = None
    shared_out: bool = False
    note: str = ""

    @property
    def visible(self) -> list[str]:
        """The device, as ``CUDA_VISIBLE_DEVICES`` names it; none for the CPU."""
        return [] if self.device is None else [self.device.visible]

    @property
    def text(self) -> str:
        """What to call it in the plan.

        >>> Placed(device=Device("0", "GPU-1"), shared_out=True).text, Placed().text
        ('GPU 0 (shared out)', 'CPU')
        """
        if self.device is None:
            return "CPU"
        return f"GPU {self.device.visible}{' (shared out)' if self.shared_out else ''}"


def share_out(cards: Sequence[RankCard], plan: ResourcePlan) -> list[Placed]:
    """Returns the device of every rank.

    A rank keeps what Spark gave it. The others of a host take its devices in turn, by rank. Ranks that
    take every step together go at the pace of the slowest: either all have a device, or all compute on the CPU.

    Args:
        cards: One of every rank, by rank.
        plan: Where devices come from.

    Raises:
        ClusterError: Two ranks have the same device; or devices are demanded, and a rank has none.
    """
    taken = {(card.host, card.assigned.identity) for card in cards if card.assigned is not None}
    placed: list[Placed] = []
    for card in cards:
        free = [device for device in card.shareable if (card.host, device.identity) not in taken]
        device = card.assigned or (free[0] if free else None)
        if device is not None:
            taken.add((card.host, device.identity))
        placed.append(Placed(device=device, shared_out=device is not None and card.assigned is None))
    refuse_collisions(cards, placed, plan)
    without = [card for card, place in zip(cards, placed, strict=True) if place.device is None]
    if not without:
        return placed
    if plan.required:
        raise ClusterError(_too_few(cards, without[0], plan))
    if len(without) == len(cards):
        return placed
    # Ranks that have a device of Spark's have begun with it.
    kept = [place for place in placed if place.device is not None and not place.shared_out]
    whose = "some" if kept else "all"
    note = f"useGpu='auto': {whose} ranks compute on the CPU: {_too_few(cards, without[0], plan)}"
    return [
        replace(place, note=note) if place.device is not None and not place.shared_out else Placed(note=note)
        for place in placed
    ]


def refuse_collisions(cards: Sequence[RankCard], placed: Sequence[Placed], plan: ResourcePlan) -> None:
    """Raises ClusterError where two ranks would compute on the same device of the same host."""
    owners: dict[tuple[str, str], RankCard] = {}
    for card, place in zip(cards, placed, strict=True):
        if place.device is None:
            continue
        other = owners.setdefault((card.host, place.device.identity), card)
        if other is not card:
            ranks = f"ranks {other.rank} and {card.rank} (executors {other.executor} and {card.executor})"
            raise ClusterError(collision(place.device.visible, card.host, ranks, plan.resource))


def collision(device: str, host: str, ranks: str, resource: str) -> str:
    """Returns what to say of a device that Spark has given to two ranks of a fit.

    Args:
        device: Its name.
        host: Its host.
        ranks: Those that have it.
        resource: What Spark calls such devices.
    """
    return (
        f"expected a GPU of its own for every rank. Received: GPU {device} of {host} for {ranks}. "
        "Executors of one host must be told of different GPUs: on a standalone cluster start one worker on a host, "
        f"with spark.worker.resource.{resource}.amount GPUs, and let it start several executors (spark.executor.cores "
        f"and spark.executor.resource.{resource}.amount), or give each worker a discovery script of its own; "
        f"local-cluster runs one script for all of its workers: let it have one. "
        f"Where one executor runs several tasks, set spark.task.resource.{resource}.amount to a whole number."
    )


def _too_few(cards: Sequence[RankCard], lacking: RankCard, plan: ResourcePlan) -> str:
    if not lacking.shareable:
        return no_gpus(plan).replace("useGpu=True: ", "")
    here = [card.rank for card in cards if card.host == lacking.host]
    return (
        f"expected a GPU for each of the {len(here)} ranks on {lacking.host}. Received: {len(lacking.shareable)}. "
        "Lower numWorkers, give the fit more hosts, or set useGpu=False."
    )
