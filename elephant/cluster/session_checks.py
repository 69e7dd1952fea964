"""Checks of a session's settings alone: dynamic allocation, and encryption that elephant's sockets do not have."""

from __future__ import annotations

import math
from collections.abc import Mapping

from elephant.cluster.finding import FAILURE, OK, WARNING, Finding, finding
from elephant.cluster.settings import (
    DYNAMIC_ALLOCATION,
    allocates_executors,
    cpus_of_task,
    is_true,
    tasks_on,
    whole_number,
)

ALLOW_PLAINTEXT = "spark.elephant.allowPlaintext"

# What asks Spark to encrypt what goes over the network, besides spark.authenticate with SASL encryption.
_ENCRYPTION = ("spark.ssl.enabled", "spark.ssl.rpc.enabled", "spark.network.crypto.enabled")
_SASL = "spark.authenticate.enableSaslEncryption"
_NO_LIMIT = 2**31 - 1


def check_dynamic_allocation(
    settings: Mapping[str, str], *, num_workers: int, synchronous: bool, servers: int = 0
) -> Finding:
    """Returns whether executors that come and go are in the way of a fit.

    Spark refuses a barrier stage with dynamic allocation. Asynchronous workers are ordinary
    tasks, for which Spark asks for executors; their rows are behind a shuffle, which must
    outlive the executors that wrote it.

    Args:
        settings: The session's.
        num_workers: Workers of the fit.
        synchronous: Whether they run as a barrier stage.
        servers: Parameter servers on executors.
    """
    name, per_executor = "dynamic allocation", _slots_per_executor(settings)
    instances = max(math.ceil(num_workers / per_executor), 1)
    if not allocates_executors(settings):
        received = "true, which local mode does without" if is_true(settings, DYNAMIC_ALLOCATION) else "false"
        return finding(name, OK, expected=f"{DYNAMIC_ALLOCATION}=false", received=received)
    if synchronous:
        remedy = (
            f"Set it to false, and spark.executor.instances={instances} or more (spark.cores.max on a standalone "
            "cluster), when the application starts; or train with mode='asynchronous', which runs with it."
        )
        expected = f"{DYNAMIC_ALLOCATION}=false: Spark refuses a barrier stage otherwise"
        return finding(name, FAILURE, expected=expected, received="true", remedy=remedy)
    most = whole_number(settings, "spark.dynamicAllocation.maxExecutors", _NO_LIMIT) * per_executor
    if most <= servers:
        return finding(
            name,
            FAILURE,
            expected=f"room for {servers} parameter servers and at least one worker",
            received=f"at most {most} task slots (spark.dynamicAllocation.maxExecutors)",
            remedy=f"Set spark.dynamicAllocation.maxExecutors={math.ceil((servers + num_workers) / per_executor)}.",
        )
    return _kept_executors(settings, instances, most - servers, num_workers)


def _kept_executors(settings: Mapping[str, str], instances: int, most: int, num_workers: int) -> Finding:
    """Returns what is worth setting for an asynchronous fit on executors that come and go."""
    name, advice = "dynamic allocation", []
    tracked = is_true(settings, "spark.dynamicAllocation.shuffleTracking.enabled")
    # Spark's own default has been true since 3.4.
    unset = "spark.dynamicAllocation.shuffleTracking.enabled" not in settings
    if not (tracked or unset or is_true(settings, "spark.shuffle.service.enabled")):
        advice.append("spark.dynamicAllocation.shuffleTracking.enabled=true keeps executors whose shuffle is read")
    if whole_number(settings, "spark.dynamicAllocation.minExecutors", 0) < instances:
        advice.append(f"spark.dynamicAllocation.minExecutors={instances} lets all workers start at once")
    if most < num_workers:
        advice.append(f"with spark.dynamicAllocation.maxExecutors as it is, workers take turns on {most} task slots")
    return finding(
        name,
        not advice,
        otherwise=WARNING,
        expected="executors that stay as long as the fit",
        received="true, with which they come when tasks wait and go when they are idle",
        remedy=f"{'; '.join(advice)}.",
    )


def _slots_per_executor(settings: Mapping[str, str]) -> int:
    return max(tasks_on(whole_number(settings, "spark.executor.cores", 1), cpus_of_task(settings)), 1)


def check_encryption(settings: Mapping[str, str]) -> Finding:
    """Returns whether the session asks for an encrypted network, which elephant's own sockets are not.

    Args:
        settings: The session's.
    """
    asked = [name for name in _ENCRYPTION if is_true(settings, name)]
    if is_true(settings, "spark.authenticate") and is_true(settings, _SASL):
        asked.append(_SASL)
    received = ", ".join(f"{name}=true" for name in asked) or "a network that Spark does not encrypt either"
    allowed = is_true(settings, ALLOW_PLAINTEXT)
    return finding(
        "encryption",
        OK if not asked else WARNING if allowed else FAILURE,
        expected="no setting that asks for encryption: the connections between elephant's own processes are "
        "authenticated, and not encrypted",
        received=received + (f", and {ALLOW_PLAINTEXT}=true" if asked and allowed else ""),
        remedy="Gradients and weights cross the network in the clear."
        if allowed
        else f"Set {ALLOW_PLAINTEXT}=true where gradients and weights may cross the network in the clear, or encrypt "
        "the network below (WireGuard, IPsec, an encrypted pod network).",
    )


def check_disk_encryption(settings: Mapping[str, str]) -> Finding:
    """Returns whether the session asks for encrypted local files, which the workers' rows are not.

    Args:
        settings: The session's.
    """
    asked = is_true(settings, "spark.io.encryption.enabled")
    return finding(
        "local files",
        not asked,
        otherwise=WARNING,
        expected="spark.io.encryption.enabled=false: workers keep their rows as plain files in Spark's local folders",
        received="true" if asked else "false",
        remedy="The rows lie there in the clear while a fit runs: encrypt the disk if they must not.",
    )
