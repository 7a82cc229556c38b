import gc
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from trouble import Deadly, Misfit, happy, refuse, stumble

from fedhelix import METHODS, FedAvg, FedAvgFT, FedBN, FedPer
from fedhelix.core.errors import EngineFailure, UserError
from fedhelix.core.means import means_by_group
from fedhelix.core.registry import make
from fedhelix.data import from_arrays
from fedhelix.engines import Parallel, Serial
from fedhelix.engines.local import ClientTask
from fedhelix.engines.parallel import pool
from fedhelix.engines.parallel.pool import MESSAGES_EACH, answers, cores, in_chunks, unwrap
from fedhelix.engines.parallel.shared import dumps
from fedhelix.engines.parallel.worker import Calls, WorkerLoop
from helpers import same, small, timeless


@pytest.fixture(scope="module", autouse=True)
def _no_leftovers():
    yield
    gc.collect()
    waiting = [worker.process for worker in pool.IDLE]
    pool.shut_down()
    assert all(process.poll() is not None for process in waiting)


def parallel(fed, workers=2):
    """The same federation on worker processes."""
    fed.engine = Parallel(fed.engine.setup, workers)
    return fed


def tasks_of(fed, clients=range(6)):
    server, _ = fed.method.server_init({}, fed.context(0, 1))
    return [
        ClientTask(client, 0, fed.method.download(server, client, fed.context(0, 1)), {})
        for client in clients
    ]


def files_of(engine):
    return Path(engine._pool.folder.name)


def equal_results(left, right):
    return all(
        one.loss == other.loss
        and same(one.upload, other.upload)
        and same(one.client_state, other.client_state)
        for one, other in zip(left, right, strict=True)
    )


CASES = [
    *[
        (METHODS[name](), "mlp", {})
        for name in ("fedavg", "fedper", "scaffold", "ditto", "fedavg-ft", "local")
    ],
    (FedBN(), "digits-bn-cnn", {"momentum": 0.9}),
    (FedAvg(), nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(64, 10)), {}),
    (
        FedPer(),
        "mlp",
        {"data": from_arrays(torch.rand(200, 5), torch.rand(200)), "partition": "iid"},
    ),
]


@pytest.mark.parametrize(
    ("method", "model", "more"), CASES, ids=lambda case: getattr(case, "name", "")
)
def test_equal_to_serial_to_the_bit(method, model, more):
    serial, other = small(method, model, **more), parallel(small(method, model, **more))
    expected, actual = serial.fit(2, quiet=True), other.fit(2, quiet=True)
    assert other.engine._pool is not None and other.engine._pool.workers
    assert timeless(actual.records) == timeless(expected.records)
    first, second = actual.records
    assert first["start_seconds"] > 0 and "start_seconds" not in second
    assert same(actual.state.server, expected.state.server)
    assert actual.state.client_states.keys() == expected.state.client_states.keys()
    assert all(
        same(actual.state.client_states[client], client_state)
        for client, client_state in expected.state.client_states.items()
    )
    assert same(actual.personal(3).state_dict(), expected.personal(3).state_dict())
    other.close()


def test_the_number_of_workers_does_not_matter():
    fed = small(FedPer(), "mlp")
    expected = fed.engine.run_clients(tasks_of(fed))
    for workers in (1, 3):
        engine = Parallel(fed.engine.setup, workers)
        assert equal_results(engine.run_clients(tasks_of(fed)), expected)
        assert len(engine._pool.workers) == workers
        engine.close()
    engine = Parallel(fed.engine.setup, workers=3)
    engine.run_clients(tasks_of(fed, [4]))
    assert len(engine._pool.workers) == 1  # never more than there are tasks
    engine.close()


def test_models_are_scored_in_parts_as_serial_does_it():
    fed = small(model="digits-cnn")
    serial, engine = fed.engine, Parallel(fed.engine.setup, workers=2)
    states = [fed.initial, {name: value / 2 for name, value in fed.initial.items()}]
    some = torch.arange(1400)
    assert torch.equal(
        engine.outputs(states[0], "train", some), serial.outputs(states[0], "train", some)
    )
    assert engine.score(states, "train") == serial.score(states, "train")
    assert engine.score(states, "test", torch.tensor([5, 3])) == serial.score(
        states, "test", torch.tensor([5, 3])
    )
    means = means_by_group(states, [1, 2])([(0, 1), (1,), (0,)])
    assert engine.score(means, "train") == serial.score(list(means), "train")
    assert engine.client_init(tasks_of(fed)) == serial.client_init(tasks_of(fed))
    engine.close()


def test_workers_and_files_are_given_back():
    fed = parallel(small())
    fed.engine.run_clients(tasks_of(fed))
    files, workers = files_of(fed.engine), list(fed.engine._pool.workers)
    # Only the data are left; payloads go with their round.
    assert [file.name for file in files.iterdir()] == ["0"]
    fed.close()
    fed.close()
    assert not files.exists() and set(workers) <= set(pool.IDLE)
    again = parallel(small(FedAvgFT()), workers=1)
    again.engine.run_clients(tasks_of(again))
    assert set(again.engine._pool.workers) <= set(workers)  # no new process was needed
    workers, files = list(again.engine._pool.workers), files_of(again.engine)
    del again  # somebody forgot to close
    gc.collect()
    assert not files.exists() and not any(worker.alive for worker in workers)


@pytest.mark.parametrize("messages", [1, 16])
def test_a_dead_worker_is_replaced_and_the_second_death_names_the_client(
    tmp_path, monkeypatch, messages
):
    monkeypatch.setattr(pool, "MESSAGES_EACH", messages)  # 1: all clients in one message
    fed = small(Deadly(folder=str(tmp_path)))
    engine = Parallel(fed.engine.setup, workers=1)
    actual = engine.run_clients(tasks_of(fed, [0, 1, 3]))
    assert (tmp_path / "1").exists()
    assert equal_results(actual, Serial(small().engine.setup).run_clients(tasks_of(fed, [0, 1, 3])))
    files = files_of(engine)
    with pytest.raises(EngineFailure, match="died twice with client 2"):
        engine.run_clients(tasks_of(fed, [0, 2, 3]))
    assert not files.exists()


def test_an_idle_worker_that_died_is_replaced():
    fed = parallel(small(), workers=1)
    expected = fed.engine.run_clients(tasks_of(fed))
    for worker in fed.engine._pool.workers:
        worker.process.kill()
        worker.process.wait()
    assert equal_results(fed.engine.run_clients(tasks_of(fed)), expected)
    fed.close()


def test_after_an_interrupt_nothing_is_left_and_the_engine_works_again(monkeypatch):
    fed = parallel(small(), workers=1)
    expected = fed.engine.run_clients(tasks_of(fed))
    workers, files = list(fed.engine._pool.workers), files_of(fed.engine)
    with monkeypatch.context() as patch:
        patch.setattr(pool, "wait", lambda pipes: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            fed.engine.run_clients(tasks_of(fed))
    assert not files.exists() and not any(worker.alive for worker in workers)
    assert equal_results(fed.engine.run_clients(tasks_of(fed)), expected)
    fed.close()


@pytest.mark.parametrize(
    ("function", "kind", "words"),
    [
        (refuse, UserError, "^a sentence.$"),
        (stumble, EngineFailure, "(?s)client 3.*KeyError: 'a bug'.*in stumble"),
    ],
)
def test_a_worker_s_exception_is_raised_here(function, kind, words):
    work = Calls([(happy, ()), (function, ()), (happy, ())])
    first, answer = answers(WorkerLoop(pipe=None).answer(dumps(work)))  # the third is not tried
    assert unwrap(first, "client 2") == "well"
    with pytest.raises(kind, match=words):
        unwrap(answer, "client 3")


def test_bad_settings_are_refused():
    setup = small().engine.setup
    with pytest.raises(UserError, match="workers must be at least 1, not 0"):
        Parallel(setup, workers=0)
    with pytest.raises(UserError, match="works on the CPU, not on cuda"):
        Parallel(replace(setup, device=torch.device("cuda")))
    assert Parallel(setup).workers == cores() >= 1


def test_what_cannot_be_sent_runs_in_this_process():
    fed = small(
        loss=lambda output, target: nn.functional.cross_entropy(output, target, reduction="none")
    )
    engine = Parallel(fed.engine.setup)
    with pytest.warns(
        UserWarning, match="one after the other, because the federation cannot be sent"
    ) as warned:
        actual = engine.run_clients(tasks_of(fed))
        engine.evaluate(tasks_of(fed))
    assert len(warned) == 1 and equal_results(actual, fed.engine.run_clients(tasks_of(fed)))
    assert engine.used == "serial" and engine.why.startswith("the federation cannot be sent")


FILE = """
from dataclasses import dataclass
from fedhelix import FedAvg, register

@register("halved")
@dataclass(frozen=True)
class Halved(FedAvg):
    def upload(self, local):
        return {"model": {name: value / 2 for name, value in local.models["model"].items()}}, {}
"""


def test_a_method_from_a_file_reaches_the_workers(tmp_path):
    (tmp_path / "halved.py").write_text(FILE)
    method = make(str(tmp_path / "halved.py"))
    fed = parallel(small(method), workers=1)
    assert equal_results(
        fed.engine.run_clients(tasks_of(fed)), small(method).engine.run_clients(tasks_of(fed))
    )
    assert not fed.engine.alone
    fed.close()


SCRIPT = """
import json, os, signal
import torch
from torch import nn
from fedhelix import Federation, from_arrays

class Net(nn.Sequential):
    pass

def fit(model, engine):
    fed = Federation(data, "iid", clients=4, model=model, engine=engine, epochs=1)
    return fed, fed.fit(1, quiet=True).records[0]["loss"]

torch.set_num_threads(1)
os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])  # one worker starts faster than two
data = from_arrays(torch.linspace(0, 1, 800).view(100, 8), torch.arange(100) % 3)
net = nn.Sequential(nn.Flatten(), nn.Linear(8, 3))
fed, plain = fit(net, "parallel")
alone, own_class = fit(Net(*net), "parallel")
pool = fed.engine._pool
print(json.dumps({
    "plain": plain, "own_class": own_class, "serial": fit(net, "serial")[1],
    "alone": alone.engine.alone, "folder": pool.folder.name,
    "workers": [worker.process.pid for worker in pool.workers],
}), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_script_without_a_main_guard_works_and_its_violent_end_leaves_nothing(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    printed = json.loads(done.stdout)
    assert printed["plain"] == printed["own_class"] == printed["serial"]
    assert len(printed["workers"]) == 1 and printed["alone"]
    assert (
        done.stderr.count("'Net' is defined in the main script; put it into a module of its own")
        == 1
    )
    end = time.monotonic() + 10
    while time.monotonic() < end and (
        Path(printed["folder"]).exists() or any(map(is_running, printed["workers"]))
    ):
        time.sleep(0.05)
    assert not Path(printed["folder"]).exists() and not any(map(is_running, printed["workers"]))


def is_running(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{process}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


@given(st.lists(st.integers(0, 50), max_size=200), st.integers(0, 3), st.integers(0, 9))
def test_every_item_is_in_one_message_and_long_ones_are_alone(sizes, workers, most):
    chunks = in_chunks(sizes, workers, most)
    assert sorted(index for chunk in chunks for index in chunk) == list(range(len(sizes)))
    enough = sum(sizes) / (MESSAGES_EACH * max(1, workers))
    for chunk in chunks:
        assert len(chunk) == 1 or sum(sizes[index] for index in chunk) <= enough
        assert 1 <= len(chunk) <= max(1, most)
    longest = [max(sizes[index] for index in chunk) for chunk in chunks]
    assert longest == sorted(longest)


def test_many_short_clients_share_few_messages():
    assert len(in_chunks([8] * 1000, 2, 500)) <= 2 * MESSAGES_EACH + 2
    assert [len(chunk) for chunk in in_chunks([9, 8, 7], 2, 500)] == [1, 1, 1]


def test_a_payload_that_does_not_fit_the_network_is_a_mistake_of_its_hook():
    with pytest.raises(
        UserError, match=r"^misfit\.download has shape \(3,\) for 'fc\.bias' instead"
    ):
        small(Misfit(), engine="parallel", workers=2).fit(1, quiet=True)
