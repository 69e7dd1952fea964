"""Weights of one worker, and the two ways in which a pair of workers mixes them.

An exchange is a gift: one worker gives away what the other takes, computed once, so that the sum over both stays what
it was, as far as float32 adds without rounding. What is given is subtracted from weights that may have moved meanwhile.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

W = TypeVar("W", bound="type[Weights]")


@dataclass(frozen=True, eq=False)
class Parcel:
    """Weights on their way.

    Args:
        values: Float32 of shape (values,); empty where they need not travel.
        share: Push-sum weight that goes with them.
        steps: By partition, the last step whose effect is in the weights that they come from; int64.
    """

    values: np.ndarray
    share: float
    steps: np.ndarray


class Weights(ABC):
    """Weights of one worker, which its training and its peers change. Any thread may use them.

    Args:
        values: What they begin as, float32 of shape (values,); copied.
        steps: By partition, the last step whose effect is in them, int64; copied.
        share: Push-sum weight; the weights to train with are ``values / share``.
    """

    def __init__(self, values: np.ndarray, steps: np.ndarray, share: float = 1.0) -> None:
        self._values = np.array(values, np.float32)
        self._steps = np.array(steps, np.int64)
        self._share = float(share)
        self._using = threading.Lock()

    def held(self) -> Parcel:
        """Returns a copy of all that they are."""
        with self._using:
            return Parcel(self._values.copy(), self._share, self._steps.copy())

    def trained(self) -> Parcel:
        """Returns a copy of the weights to train with, whose share is one."""
        with self._using:
            return Parcel(self._values / np.float32(self._share), 1.0, self._steps.copy())

    def move(self, move: np.ndarray, partition: int, step: int) -> bool:
        """Adds what the steps of this worker have changed in the weights that it trains with.

        Args:
            move: Float32 of shape (values,).
            partition: The worker.
            step: Its last step.

        Returns:
            False where the move is not finite: it is left out then, and its steps are counted.
        """
        finite = bool(np.isfinite(move).all())
        with self._using:
            if finite:
                self._values += move * np.float32(self._share)
            self._steps[partition] = max(self._steps[partition], step)
        return finite

    @abstractmethod
    def offer(self) -> Parcel:
        """Returns what this worker sends to one that it asks."""

    @abstractmethod
    def gift_for(self, offer_parcel: Parcel) -> Parcel:
        """Returns what the sender of an offer is to give to this worker."""

    @abstractmethod
    def gift_from(self, offer_parcel: Parcel, reply_parcel: Parcel) -> Parcel:
        """Returns the gift that an offer and its reply agree on: what the worker that was asked has computed."""

    @abstractmethod
    def reply_to(self, gift_parcel: Parcel) -> Parcel:
        """Returns what this worker answers, of the gift that it has computed."""

    def give(self, gift_parcel: Parcel) -> None:
        """Gives a gift away; its steps are those that are in the other's weights."""
        with self._using:
            self._values -= gift_parcel.values
            self._share -= gift_parcel.share
            np.maximum(self._steps, gift_parcel.steps, out=self._steps)

    def take(self, gift_parcel: Parcel) -> None:
        """Takes a gift; its steps are those that are in the giver's weights."""
        with self._using:
            self._values += gift_parcel.values
            self._share += gift_parcel.share
            np.maximum(self._steps, gift_parcel.steps, out=self._steps)


WEIGHTS: dict[str, type[Weights]] = {}


def _register(name: str) -> Callable[[W], W]:
    def register(kind: W) -> W:
        WEIGHTS[name] = kind
        return kind

    return register


@_register("adpsgd")
class AveragedWeights(Weights):
    """Two workers become their average: each moves by half of the difference.

    Lian et al. 2018, *Asynchronous Decentralized Parallel Stochastic Gradient Descent*, algorithm 1.

    >>> mine = AveragedWeights(np.zeros(1), np.zeros(2))
    >>> theirs = AveragedWeights(np.full(1, 4.0), np.zeros(2))
    >>> gift = theirs.gift_for(mine.offer())
    >>> mine.give(mine.gift_from(mine.offer(), theirs.reply_to(gift))); theirs.take(gift)
    >>> mine.held().values, theirs.held().values
    (array([2.], dtype=float32), array([2.], dtype=float32))
    """

    def offer(self) -> Parcel:
        return self.held()

    def gift_for(self, offer_parcel: Parcel) -> Parcel:
        with self._using:
            half = (offer_parcel.values - self._values) * np.float32(0.5)
        return Parcel(half, 0.0, offer_parcel.steps)

    def reply_to(self, gift_parcel: Parcel) -> Parcel:
        with self._using:
            return Parcel(gift_parcel.values, 0.0, self._steps.copy())

    def gift_from(self, offer_parcel: Parcel, reply_parcel: Parcel) -> Parcel:
        return reply_parcel


@_register("sgp")
class PushSumWeights(Weights):
    """A worker pushes half of its weights, and half of their share, to the one that it asks.

    Assran et al. 2019, *Stochastic Gradient Push for Distributed Deep Learning*, algorithm 1, overlapped. Unlike there,
    a step moves the weights to train with by what the optimizer says, whatever the share: a worker that gives faster
    than it gets would otherwise take ever larger steps.

    >>> mine, theirs = PushSumWeights(np.full(1, 4.0), np.zeros(2)), PushSumWeights(np.zeros(1), np.zeros(2))
    >>> offer = mine.offer(); gift = theirs.gift_for(offer)
    >>> mine.give(mine.gift_from(offer, theirs.reply_to(gift))); theirs.take(gift)
    >>> theirs.held().values, theirs.held().share, mine.held().share
    (array([2.], dtype=float32), 1.5, 0.5)
    """

    def offer(self) -> Parcel:
        with self._using:
            return Parcel(self._values * np.float32(0.5), self._share * 0.5, self._steps.copy())

    def gift_for(self, offer_parcel: Parcel) -> Parcel:
        return offer_parcel

    def reply_to(self, gift_parcel: Parcel) -> Parcel:
        return Parcel(np.empty(0, np.float32), 0.0, np.zeros_like(gift_parcel.steps))

    def gift_from(self, offer_parcel: Parcel, reply_parcel: Parcel) -> Parcel:
        # The other one's steps stay with the other one: nothing of its weights comes back.
        return Parcel(offer_parcel.values, offer_parcel.share, reply_parcel.steps)
