"""GPUs as slots, on Prefect's real limits; they need the names of GPUs, not the GPUs."""

import threading
import time

import pytest

from pipelines.orchestration import gpus

pytestmark = [pytest.mark.xdist_group("flow"), pytest.mark.usefixtures("prefect_server")]


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in gpus.offer(["0", "3"], runs_each=1).items():
        monkeypatch.setenv(key, value)


def test_no_two_runs_have_one_gpu_and_a_third_waits(two_gpus: None) -> None:
    taken: list[str] = []

    def third() -> None:
        with gpus.take(1) as environment:
            taken.append(environment["CUDA_VISIBLE_DEVICES"])

    with gpus.take(1) as first:
        with gpus.take(1) as second:
            assert {first["CUDA_VISIBLE_DEVICES"], second["CUDA_VISIBLE_DEVICES"]} == {"0", "3"}
            thread = threading.Thread(target=third)
            thread.start()
            time.sleep(3)  # it would have had one by now
            assert not taken
        thread.join(timeout=30)
        assert taken == [second["CUDA_VISIBLE_DEVICES"]]


def test_a_run_takes_all_gpus_that_it_requests_or_none(two_gpus: None) -> None:
    taken: list[str] = []

    def both() -> None:
        with gpus.take(2) as environment:
            taken.append(environment["CUDA_VISIBLE_DEVICES"])

    with gpus.take(1):
        thread = threading.Thread(target=both)
        thread.start()
        time.sleep(3)
        with gpus.take(1):  # the one that the waiting run cannot use alone
            assert not taken
    thread.join(timeout=30)
    assert taken == ["0,3"]


def test_a_gpu_takes_as_many_runs_as_it_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in gpus.offer(["7"], runs_each=2).items():
        monkeypatch.setenv(key, value)
    with gpus.take(1) as first, gpus.take(1) as second:
        assert first == second == {"CUDA_VISIBLE_DEVICES": "7"}


def test_more_than_there_are_is_refused(two_gpus: None) -> None:
    with pytest.raises(ValueError, match="3 are requested, but this worker has 2"), gpus.take(3):
        pass


def test_a_worker_without_gpus_hides_those_of_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TAP_GPUS", raising=False)
    with gpus.take(1) as environment:
        assert environment == {"CUDA_VISIBLE_DEVICES": ""}
