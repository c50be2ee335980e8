import resource
from pathlib import Path

import mlflow
import pytest
from sqlalchemy.exc import OperationalError

from tap.tracking.mlflow_store import connect, experiment


@pytest.mark.parametrize("name", ["moved", "100% of it, elsewhere"])
def test_a_moved_folder_takes_its_artifacts_along(tmp_path: Path, name: str) -> None:
    first, second = tmp_path / "first", tmp_path / name
    first.mkdir()
    client = connect(f"sqlite:///{first}/mlflow.db")
    run = client.create_run(experiment(client).experiment_id)
    client.log_text(run.info.run_id, "kept", "note.txt")
    client.create_registered_model("model")
    client.create_model_version("model", f"{run.info.artifact_uri}/note.txt", run.info.run_id)
    first.rename(second)

    client = connect(f"sqlite:///{second}/mlflow.db")
    folder = (second / "mlartifacts").as_uri()
    assert client.get_run(run.info.run_id).info.artifact_uri == f"{folder}/{run.info.run_id}/artifacts"
    assert client.get_model_version("model", "1").source == f"{folder}/{run.info.run_id}/artifacts/note.txt"
    assert Path(client.download_artifacts(run.info.run_id, "note.txt")).read_text() == "kept"
    later = client.create_run(experiment(client).experiment_id)
    client.log_text(later.info.run_id, "new", "note.txt")
    assert (second / "mlartifacts" / later.info.run_id / "artifacts/note.txt").read_text() == "new"
    assert not first.exists()


def test_artifacts_that_are_kept_elsewhere_stay_there(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    mlflow.MlflowClient(uri).create_experiment("tap", artifact_location="s3://bucket/mlartifacts")
    assert experiment(connect(uri)).artifact_location == "s3://bucket/mlartifacts"


def test_a_store_whose_creation_failed_on_a_full_disk_is_created_by_the_next_attempt(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
    try:
        with pytest.raises(OperationalError):
            connect(uri)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []
    assert connect(uri).get_experiment_by_name("tap") is not None
    assert (tmp_path / "mlflow.db").stat().st_size > 300_000
