"""Encrypted runs whose ranks are processes of this machine: same results, and nothing for a proxy to read."""

import functools
from dataclasses import replace

import numpy as np
import pytest
from keras_reference import classifier_data, regression_model
from proxies import recording_proxy

from elephant.cluster.gpu_plan import NONE, ResourcePlan
from elephant.config import Timeouts
from elephant.driver import run_ranks
from elephant.driver.launcher import LocalLauncher
from elephant.driver.local_ranks import function_spec, pickled_call
from elephant.driver.run import unpickled
from elephant.monitor.progress import Progress
from elephant.testing import fit_local

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("warm_ranks", "by_value")]
SECRET = "what a rank of this run says to the driver"
TIMEOUTS = Timeouts(connect_s=60)


class ProxiedLauncher(LocalLauncher):
    """Starts ranks that reach the driver through a recording proxy alone."""

    def __init__(self, rows, kept):
        super().__init__(rows)
        self._kept = kept

    def start(self, spec, run):
        proxy = self._closing.enter_context(recording_proxy(run.driver))
        self._kept.update(proxy=proxy, token=run.token)
        return super().start(spec, replace(run, driver=proxy.address))


def say_and_sum(say):
    import elephant

    print(say, flush=True)
    return float(elephant.collective.allreduce(np.array([elephant.collective.rank() + 1.0]))[0])


@pytest.mark.parametrize("encryption", [False, True], ids=["plain", "tls"])
def test_a_proxy_between_ranks_and_driver_reads_what_they_say_over_plain_connections_alone(encryption):
    kept, rows, count = {}, [()] * 2, 2
    plan = ResourcePlan(devices=NONE, slots_needed=count)
    # It is printed, so that it goes to the driver alone; the call itself does not cross the network here.
    spec = function_spec(pickled_call(say_and_sum, (SECRET,), {}), plan, TIMEOUTS, {}, shows_output=True)
    spec = replace(spec, encryption=encryption, backend=None)
    progress = Progress(num_workers=count, epochs=0, verbose=1)
    result = functools.partial(run_ranks.results_of, count)
    launcher_of = functools.partial(ProxiedLauncher, kept=kept)
    attempt_on = functools.partial(run_ranks.attempt_here, launcher_of, spec, progress, result=result)
    results = run_ranks.run_ranks(rows, spec, progress, attempt_on)
    assert [unpickled(one, rank) for rank, one in enumerate(results)] == [3.0, 3.0]
    seen, is_visible = kept["proxy"].seen, not encryption
    assert len(seen) > 1000
    assert (SECRET.encode() in seen) is is_visible
    assert (b"elephant/auth" in seen) is is_visible
    assert kept["token"][:32] not in seen


def test_fit_when_encrypted_then_its_weights_and_history_are_bit_for_bit_those_of_a_plain_one():
    data = classifier_data(48)
    results = [
        fit_local(
            regression_model("sgd"), data["features"], data["label"], num_workers=2, epochs=2, encryption=encryption
        )
        for encryption in (False, True)
    ]
    (history, model), (other_history, other_model) = results
    assert history == other_history
    for value, other in zip(model.get_weights(), other_model.get_weights(), strict=True):
        np.testing.assert_array_equal(value, other)
